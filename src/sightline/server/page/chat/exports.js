// A conversation as a file. Markdown holds what the reader sees; JSON holds every branch.
import { make } from "../dom.js";
import { shownTurns } from "./conversation.js";

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  for (const { question, answer } of shownTurns(conversation)) {
    parts.push("## Question", question.text, "## Answer");
    for (const round of [...answer.rounds, answer]) parts.push(...partsOf(round));
    if (!answer.text.trim()) parts.push("(no answer)");
  }
  return parts.filter(Boolean).join("\n\n") + "\n";
}

function partsOf({ thought, text, calls }) {
  const folded = thought && `<details><summary>Reasoning</summary>\n\n${thought.trim()}\n\n</details>`;
  const called = calls.flatMap(({ name, arguments: text, result }) =>
    [`### Call of \`${name}\``, fenced(text, "json"), result === null ? "Not run." : "Result:", result && fenced(result, "")]);
  return [folded, text.trim(), ...called];
}

function fenced(text, language) { // by more backticks than there are in the text
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
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
