// One round of an answer on the page: its reasoning, its text, and the calls of tools that ended it.
import { icon, make } from "../dom.js";
import { CodeBlock } from "./elements.js";
import { beginsAsJson, prettyJson } from "./json.js";
import { Markdown } from "./markdown.js";

export class RoundView {
  constructor() {
    this.text = make("div", { class: "text" });
    this.thoughtText = make("div", { class: "text" });
    this.thoughtTitle = make("span");
    const title = make("summary", {}, icon("thought"), this.thoughtTitle);
    this.thought = make("details", { class: "thought", hidden: true }, title, this.thoughtText);
    this.calls = make("div", { class: "calls" });
    this.parts = [this.thought, this.text, this.calls];
    this.reset();
  }
  reset() {
    this.thoughtText.replaceChildren();
    this.drawn = { text: new TextView(this.text), thought: new Markdown(this.thoughtText) };
    this.fed = { text: 0, thought: 0 };
    this.callViews = [];
    this.calls.replaceChildren();
  }
  feed(round, isWriting) {
    for (const name of ["text", "thought"]) {
      this.drawn[name].feed(round[name].slice(this.fed[name]));
      this.fed[name] = round[name].length;
    }
    this.thought.hidden = !round.thought;
    const thinking = isWriting && !round.text && !round.calls.length;
    this.thoughtTitle.textContent = thinking ? "Reasoning…" : "Reasoning";
    this.callViews.splice(round.calls.length).forEach((view) => view.element.remove());
    for (const [index, call] of round.calls.entries()) {
      this.callViews[index] ??= new CallView(this.calls);
      this.callViews[index].show(call, isWriting);
    }
  }
  draw() {
    this.drawn.text.draw();
    this.drawn.thought.draw();
  }
  finish() {
    this.drawn.text.finish();
    this.drawn.thought.finish();
  }
}

// Markdown, or one JSON document as code.
class TextView {
  constructor(body) {
    Object.assign(this, { body, text: "", fed: 0, markdown: null, code: null, finished: false });
    body.replaceChildren();
  }
  feed(piece) {
    if (piece) this.finished = false;
    this.text += piece;
  }
  draw() {
    if (beginsAsJson(this.text)) this.showJson();
    else this.showMarkdown().draw();
  }
  finish() {
    if (this.finished) return;
    this.finished = true;
    if (prettyJson(this.text) !== null) this.showJson();
    else this.showMarkdown().finish();
  }
  showJson() {
    if (!this.code) {
      this.code = new CodeBlock({ lang: "json", text: "" });
      this.markdown = null;
      this.body.replaceChildren(this.code.element);
    }
    this.code.update(this.text, this.text);
  }
  showMarkdown() {
    if (!this.markdown) {
      this.body.replaceChildren();
      Object.assign(this, { markdown: new Markdown(this.body), fed: 0, code: null });
    }
    this.markdown.feed(this.text.slice(this.fed));
    this.fed = this.text.length;
    return this.markdown;
  }
}

class CallView {
  constructor(calls) {
    this.asked = new CodeBlock({ lang: "json", text: "" }, "");
    this.told = new CodeBlock({ lang: "", text: "" }, "Result");
    this.asked.title.before(icon("call"));
    this.state = make("p", { class: "state" });
    this.element = make("div", { class: "call", role: "group" }, this.asked.element, this.state, this.told.element);
    calls.append(this.element);
  }
  show({ name, arguments: text, result, failed }, isWriting) {
    this.element.setAttribute("aria-label", `Call of ${name}`);
    this.element.classList.toggle("failed", failed);
    this.asked.title.textContent = name;
    if (this.asked.text !== text) this.asked.update(text, text);
    this.state.textContent = isWriting ? "Writing…" : "Not run.";
    this.state.hidden = result !== null;
    this.told.element.hidden = result === null;
    if (result !== null && this.told.text !== result) this.told.update(result, result);
  }
}
