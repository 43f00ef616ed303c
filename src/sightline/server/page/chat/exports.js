// A conversation as a file. Markdown holds what the reader sees; JSON holds every branch.
import { make } from "../dom.js";
import { shownTurns } from "./conversation.js";

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  for (const { question, answer } of shownTurns(conversation)) {
    parts.push("## Question", question.text, "## Answer");
    if (answer.thought) parts.push(`<details><summary>Reasoning</summary>\n\n${answer.thought.trim()}\n\n</details>`);
    parts.push(answer.text.trim() || "(no answer)");
  }
  return parts.join("\n\n") + "\n";
}

export function asJson(conversation) {
  return JSON.stringify({ format: "sightline.conversation", version: 1, ...conversation }, null, 2) + "\n";
}

export function download(conversation, ending, text) {
  const name = (conversation.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  const href = URL.createObjectURL(new Blob([text], { type: ending === "json" ? "application/json" : "text/markdown" }));
  make("a", { href, download: `${name || "conversation"}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}
