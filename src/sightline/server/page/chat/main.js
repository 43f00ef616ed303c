// The chat page: joins the conversations, the list, the transcript and the question box.
import { byId, isSend, say } from "../dom.js";
import { store, stored } from "../local.js";
import { Run } from "./answering.js";
import { BROKEN, setKey } from "./api.js";
import { addAnswer, addQuestion, adopt, find, hasContent, newConversation, select, shownTurns } from "./conversation.js";
import { ConversationList } from "./list.js";
import { notify } from "./notices.js";
import { currentModel, loadModels, settingsAreRight, startSettings } from "./settings.js";
import { forget, keep, keptConversations, onChangeElsewhere } from "./storage.js";
import { Transcript } from "./transcript.js";

const DRAFT = "sightline.draft";
const OPENED = "sightline.opened"; // in sessionStorage: each tab has its own
const SAVE_EVERY = 400; // milliseconds, while an answer is written
const NOT_KEPT = "This browser's storage is full or off: the conversation will not be here after a reload.";

class Chat {
  constructor() {
    this.conversations = []; // the latest first
    this.conversation = newConversation(); // the open one; kept from its first question on
    this.run = null;
    this.saving = 0;
    this.transcript = new Transcript({
      again: (answer) => this.again(answer),
      goOn: (answer) => this.start(answer, "goOn"),
      choose: (message) => this.choose(message),
      edit: (question, text) => this.edit(question, text),
    });
    this.list = new ConversationList({
      open: (conversation) => this.open(conversation),
      renamed: (conversation) => this.save(conversation),
      remove: (conversation) => this.remove(conversation),
    });
  }

  // -- Conversations
  async load() {
    try {
      const { conversations, unreadable } = await keptConversations();
      this.conversations = conversations;
      if (unreadable) notify("storage", `${unreadable} kept conversations could not be read; they are left as they are.`);
    } catch {
      notify("storage", NOT_KEPT);
    }
    const opened = this.conversations.find(({ id }) => id === stored("sessionStorage", OPENED));
    this.open(opened ?? this.conversation);
  }
  async loadAgain(changedId) { // another tab wrote
    const { conversations } = await keptConversations().catch(() => ({ conversations: this.conversations }));
    const own = [this.conversation, this.run?.conversation].filter(Boolean);
    this.conversations = conversations.map((each) => {
      const held = own.find(({ id }) => id === each.id);
      if (held) adopt(held, each, this.run?.answer);
      return held ?? each;
    });
    this.draw();
    if (changedId === this.conversation.id) {
      notify("tabs", "Another tab changed this conversation.", { label: "Reload", run: () => location.reload() });
    }
  }
  draw() {
    this.transcript.show(this.conversation, this.run);
    this.list.show(this.conversations, this.conversation);
  }
  open(conversation) {
    this.conversation = conversation;
    store("sessionStorage", OPENED, conversation.id);
    this.transcript.following = true;
    this.draw();
    if (this.run?.conversation === conversation) this.working(true);
  }
  startOver() {
    this.open(newConversation());
    say("New conversation");
    byId("question").focus();
  }
  async save(conversation) {
    clearTimeout(this.saving);
    this.saving = 0;
    this.conversations = [conversation, ...this.conversations.filter(({ id }) => id !== conversation.id)]
      .sort((one, other) => other.updated - one.updated);
    this.list.show(this.conversations, this.conversation);
    notify("storage", (await keep(conversation)) ? "" : NOT_KEPT);
  }
  saveSoon(conversation) {
    this.saving ||= setTimeout(() => this.save(conversation), SAVE_EVERY);
  }
  remove(conversation) {
    const wasOpen = conversation.id === this.conversation.id;
    if (this.run?.conversation === conversation) this.run.stop();
    clearTimeout(this.saving);
    this.saving = 0;
    this.conversations = this.conversations.filter(({ id }) => id !== conversation.id);
    forget(conversation.id);
    if (wasOpen) this.open(newConversation());
    else this.draw();
    const undo = async () => {
      await this.save(conversation);
      if (wasOpen) this.open(conversation);
      byId("question").focus();
    };
    notify("undo", `“${conversation.title || "Untitled"}” was deleted.`, { label: "Undo", run: undo });
    say("Deleted.");
  }

  // -- Asking
  isFree() { // for another answer; says why not
    if (this.run) say("Still answering. Press Escape to stop it first.");
    return !this.run && settingsAreRight();
  }
  send() {
    const box = byId("question");
    const text = box.value.trim();
    if (!text || !this.isFree()) return;
    box.value = "";
    draftChanged();
    this.ask(text);
  }
  ask(text) {
    const last = [...shownTurns(this.conversation)].at(-1)?.answer ?? null;
    this.transcript.following = true;
    this.start(addAnswer(this.conversation, addQuestion(this.conversation, last, text)), "write");
  }
  again(answer) { // beside the answer that is there; in its place if there is nothing to keep
    if (!this.isFree()) return;
    const question = find(this.conversation, answer.parent);
    byId("question").focus();
    this.start(hasContent(answer) ? addAnswer(this.conversation, question) : answer, "write");
  }
  edit(question, text) {
    if (!this.isFree()) return false;
    const edited = addQuestion(this.conversation, find(this.conversation, question.parent), text);
    byId("question").focus();
    this.transcript.following = true;
    this.start(addAnswer(this.conversation, edited), "write");
    return true;
  }
  choose(message) {
    select(this.conversation, message);
    this.transcript.following = false;
    this.draw();
    this.save(this.conversation);
    say(message.role === "user" ? "Another question is shown." : "Another answer is shown.");
  }
  start(answer, way) {
    if (!this.isFree()) return;
    notify("undo", "");
    this.run = new Run(this.conversation, answer, this);
    this.working(true);
    say("Answering");
    this.run[way]();
  }
  stop() {
    this.run?.stop();
    byId("question").focus();
  }
  working(on) {
    const focused = document.activeElement === byId("stop");
    byId("stop").hidden = !on;
    byId("send").hidden = on;
    if (!on && focused) byId("question").focus();
  }

  // -- What a run reports
  begin(run) {
    this.transcript.show(this.conversation, run);
    this.save(run.conversation);
    this.ticker = setInterval(() => this.transcript.viewOf(run.answer)?.tick(run), 500);
  }
  write(run, moved) {
    this.transcript.viewOf(run.answer)?.changed(moved);
    this.saveSoon(run.conversation);
  }
  end(run) {
    clearInterval(this.ticker);
    this.run = null;
    this.working(false);
    this.transcript.show(this.conversation, null);
    if (this.conversations.includes(run.conversation)) this.save(run.conversation); // it may be deleted by now
    announce(run.answer);
    if (run.answer.status === 401) askForKey(run.answer);
  }

  // -- The server
  async greet() {
    try {
      await loadModels();
    } catch (failure) {
      if (failure.status === 401) return askForKey(failure);
      const text = `${failure.title || "The model is unknown"}: ${failure.message}`;
      notify("models", text, { label: "Try again", run: () => this.greet() });
    }
  }
  async useKey() {
    const key = byId("key").value.trim();
    if (!key) return byId("key").focus();
    setKey(key);
    byId("key").value = "";
    byId("key-form").hidden = true;
    byId("question").focus();
    if (!currentModel()) await this.greet();
    const last = [...shownTurns(this.conversation)].at(-1)?.answer;
    if (byId("key-form").hidden && last?.status === 401 && !this.run) this.again(last);
  }
}

function announce(answer) {
  const words = { done: "The answer is complete.", stopped: "Stopped.", broken: BROKEN + ". ", failed: "No answer. " };
  say(words[answer.state] + (answer.message && answer.state !== "stopped" ? answer.message : ""));
}

function askForKey({ message }) {
  byId("key-message").textContent = message + " The key is kept for this tab only.";
  byId("key-form").hidden = false;
  byId("key").focus();
}

function draftChanged() {
  const box = byId("question");
  store("localStorage", DRAFT, box.value || null);
  box.style.height = "auto";
  box.style.height = box.scrollHeight + "px";
  byId("send").disabled = !box.value.trim();
}

function fitKeyboard() { // where an on-screen keyboard covers the page instead of shrinking it
  const view = window.visualViewport;
  const covered = view.scale === 1 && window.innerHeight - view.height > 80;
  document.documentElement.style.setProperty("--view", covered ? view.height + "px" : "100dvh");
  if (covered) window.scrollTo(0, 0);
}

const chat = new Chat();
const on = (id, type, action) => byId(id).addEventListener(type, action);
startSettings();
byId("question").value = stored("localStorage", DRAFT) ?? "";
draftChanged();
on("composer", "submit", (event) => { event.preventDefault(); chat.send(); });
on("question", "input", draftChanged);
on("question", "keydown", (event) => { if (isSend(event)) { event.preventDefault(); chat.send(); } });
on("stop", "click", () => chat.stop());
on("new", "click", () => chat.startOver());
on("key-form", "submit", (event) => { event.preventDefault(); chat.useKey(); });
for (const example of document.querySelectorAll(".example")) example.addEventListener("click", () => {
  if (!chat.isFree()) return;
  byId("question").focus();
  chat.ask(example.querySelector("span").textContent);
});
document.addEventListener("keydown", (event) => {
  const isElsewhere = byId("settings").open || document.querySelector(":popover-open");
  if (event.key === "Escape" && chat.run && !isElsewhere && !event.isComposing) chat.stop();
});
window.addEventListener("pagehide", () => { if (chat.run) keep(chat.run.conversation); });
window.visualViewport?.addEventListener("resize", fitKeyboard);
onChangeElsewhere((id) => chat.loadAgain(id));
if (matchMedia("(pointer: fine)").matches) byId("question").focus();
await chat.load();
chat.greet();
