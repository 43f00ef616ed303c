// A conversation is a tree of messages. The children of a question are its answers; the children of an answer are the
// questions that followed it. Editing a question or asking for another answer adds a sibling, so nothing is lost.
// An answer that called tools has `rounds`: what it wrote before its text, and each call with its result. `calls` are
// those of the round that is being written.
// `shown` of a message names the child that the reader sees; `shown` of the conversation names the first question.

export const ANSWERED = ["done", "stopped", "broken", "failed"]; // states of an answer that is not being written

export function identifier() { // crypto.randomUUID exists only on https and localhost
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  return { id: identifier(), title: "", renamed: false, updated: Date.now(), shown: null, messages: [] };
}

export function find(conversation, id) {
  return conversation.messages.find((message) => message.id === id) ?? null;
}

export function siblings(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent);
}

export function select(conversation, message) {
  (find(conversation, message.parent) ?? conversation).shown = message.id;
}

function add(conversation, parent, fields) {
  const message = { id: identifier(), parent: parent?.id ?? null, shown: null, ...fields };
  conversation.messages.push(message);
  conversation.updated = Date.now();
  select(conversation, message);
  return message;
}

export function addQuestion(conversation, after, text) {
  if (!conversation.renamed && !after) conversation.title = titleOf(text);
  return add(conversation, after, { role: "user", text });
}

export function addAnswer(conversation, question) {
  return add(conversation, question, { role: "assistant", ...BLANK, calls: [], rounds: [] });
}

const BLANK = { text: "", thought: "", tagged: false, state: "writing", finish: "", sampling: "", stats: null };

export function blank(answer) { // to be written from the start
  Object.assign(answer, { ...BLANK, calls: [], rounds: [], title: "", message: "", status: 0, retryAt: 0 });
}

export function nextRound(answer) { // what is written so far is a round; the rest comes after it
  const { text, thought, tagged, calls } = answer;
  answer.rounds.push({ text, thought, tagged, calls });
  dropRound(answer);
}

export function dropRound(answer) {
  Object.assign(answer, { text: "", thought: "", tagged: false, calls: [] });
}

export const hasContent = ({ text, thought, calls, rounds }) => Boolean(text || thought || calls.length || rounds.length);

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line;
}

export function* shownTurns(conversation) { // {question, answer}, from the first to the last
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  for (let question = byId.get(conversation.shown); question;) {
    const answer = byId.get(question.shown);
    if (!answer) return;
    yield { question, answer };
    question = byId.get(answer.shown);
  }
}

// What a model is told before this question. Without tools, calls are left out: not every template knows them.
export function messagesBefore(conversation, question, withCalls) {
  const messages = [];
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  for (let answer = byId.get(question.parent); answer;) {
    const asked = byId.get(answer.parent);
    // A question that got no answer is left out: two in a row are an error to many chat templates.
    if (answer.text) {
      const before = withCalls ? answer.rounds.flatMap((round) => roundMessages(round)) : [];
      messages.unshift({ role: "user", content: asked.text }, ...before, { role: "assistant", content: answer.text });
    }
    answer = byId.get(asked.parent);
  }
  return messages;
}

function roundMessages({ text, calls }, more = {}) {
  const called = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const results = calls.map(({ id, name, result }) => ({ role: "tool", tool_call_id: id, name, content: result }));
  return [{ role: "assistant", content: text, tool_calls: called, ...more }, ...results];
}

export function messagesOfRounds({ rounds }) { // of an answer that goes on: the model needs its own reasoning
  return rounds.flatMap((round) => {
    if (round.tagged) return roundMessages({ ...round, text: sourceOf(round) });
    return roundMessages(round, round.thought ? { reasoning_content: round.thought } : {});
  });
}

export function sourceOf({ text, thought, tagged }) { // an answer as the model wrote it
  if (!thought || !tagged) return text;
  return text ? `<think>${thought}</think>${text}` : `<think>${thought}`;
}

// Takes in what another tab wrote, so that neither overwrites the other's. Messages are only added; texts only grow.
export function adopt(conversation, kept, written) { // `written`: the answer that this tab is writing, if any
  const sizeOf = ({ text, thought = "", calls, rounds }) =>
    text.length + thought.length + (calls ? JSON.stringify([calls, rounds]).length : 0);
  for (const message of kept.messages) {
    const own = find(conversation, message.id);
    if (!own) conversation.messages.push(message);
    else if (own !== written && sizeOf(message) >= sizeOf(own)) Object.assign(own, message, { shown: own.shown });
  }
}

// Messages are a tree if each comes after its parent and shows a child of its own: following them comes to an end.
function isTree(conversation) {
  const byId = new Map();
  for (const message of conversation.messages) {
    const parent = message.parent === null ? null : byId.get(message.parent);
    if (parent === undefined || byId.has(message.id) || (parent?.role ?? "assistant") === message.role) return false;
    byId.set(message.id, message);
  }
  return [conversation, ...byId.values()].every((owner) => {
    const parent = owner === conversation ? null : owner.id;
    return owner.shown === null || byId.get(owner.shown)?.parent === parent;
  });
}

function areCalls(calls) {
  return Array.isArray(calls) && calls.every((call) => [call?.id, call?.name, call?.arguments, call?.result ?? ""]
    .every((text) => typeof text === "string"));
}

function areRounds(rounds) {
  return Array.isArray(rounds) && rounds.every((round) => typeof round?.text === "string" && areCalls(round.calls));
}

// What storage holds may come from another version of this page, or from a page that was closed while it wrote.
export function revived(kept) {
  const isMessage = (message) => typeof message?.id === "string" && typeof message.text === "string" &&
    (message.role === "user" || message.role === "assistant") && areCalls(message.calls ?? []) && areRounds(message.rounds ?? []);
  if (typeof kept?.id !== "string" || !Array.isArray(kept.messages) || !kept.messages.every(isMessage)) return null;
  if (!isTree(kept)) return null;
  if (typeof kept.title !== "string") kept.title = "";
  for (const message of kept.messages) {
    if (message.role !== "assistant") continue;
    message.retryAt = 0;
    message.calls ??= [];
    message.rounds ??= [];
    if (ANSWERED.includes(message.state)) continue;
    Object.assign(message, { state: "broken", message: "The page was closed before the answer was complete." });
  }
  return kept;
}
