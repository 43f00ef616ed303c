// The open conversation on the page: its questions with their answers, and the place that the reader is at.
import { byId, isSend, make, smallButton, textButton } from "../dom.js";
import { AnswerView, switcher } from "./answer_view.js";
import { shownTurns, siblings } from "./conversation.js";

export class Transcript {
  // `actions`: again, goOn, choose (an answer or a question) and edit (a question, its new text).
  constructor(actions) {
    this.actions = actions;
    this.views = new Map(); // by the question's id
    this.following = true; // the reader is at the end
    this.lastTop = 0;
    const scroller = byId("scroller");
    scroller.addEventListener("scroll", () => this.scrolled());
    new ResizeObserver(() => this.follow()).observe(scroller);
    byId("latest").addEventListener("click", () => { this.toEnd(); byId("question").focus(); });
  }
  // Draws what changed: views of turns that are still shown stay.
  show(conversation, run) {
    const views = new Map();
    for (const turn of shownTurns(conversation)) {
      const view = this.views.get(turn.question.id) ?? new TurnView(conversation, turn.question, this);
      view.show(turn.answer, run);
      views.set(turn.question.id, view);
    }
    this.views = views;
    const list = byId("exchanges");
    const elements = [...views.values()].map((view) => view.element);
    for (const element of [...list.children]) if (!elements.includes(element)) element.remove();
    for (const [index, element] of elements.entries()) {
      if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
    }
    byId("welcome").hidden = elements.length > 0;
    list.hidden = !elements.length;
    this.follow();
  }
  viewOf(answer) { // null if it is not on the page
    return this.views.get(answer.parent)?.answers.get(answer.id) ?? null;
  }
  focusSwitcher({ id, parent, role }) { // the one that was pressed is gone with what it belonged to
    const view = this.views.get(role === "user" ? id : parent);
    (role === "user" ? view.asked : view.columns).querySelector(".switcher button:enabled, .chosen .besides")?.focus();
  }
  toEnd() {
    this.following = true;
    this.follow();
  }
  follow() { // the page follows an answer only while the reader is at the end
    const scroller = byId("scroller");
    if (this.following) scroller.scrollTop = scroller.scrollHeight;
    byId("latest").hidden = this.following || this.isAtEnd();
  }
  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = byId("scroller");
    return scrollHeight - scrollTop - clientHeight < 8;
  }
  scrolled() {
    const top = byId("scroller").scrollTop;
    this.following = this.isAtEnd() || (this.following && top >= this.lastTop);
    this.lastTop = top;
    byId("latest").hidden = this.following;
  }
}

class TurnView {
  constructor(conversation, question, transcript) {
    Object.assign(this, { conversation, question, transcript });
    this.answers = new Map(); // views, by the answer's id
    this.beside = false; // all answers are shown, side by side
    this.asked = make("div", { class: "question" });
    this.columns = make("div", { class: "answers" });
    this.element = make("li", { class: "exchange" }, this.asked, this.columns);
    this.actions = {
      ...transcript.actions,
      grown: () => transcript.follow(),
      besideButton: () => this.besideButton(),
      chooser: (answer, all) => this.chooser(answer, all),
      choose: (message) => {
        transcript.actions.choose(message);
        transcript.focusSwitcher(message);
      },
    };
  }
  show(answer, run) {
    this.answer = answer;
    this.run = run;
    const all = siblings(this.conversation, answer);
    const shown = this.beside ? all : [answer];
    const views = new Map(shown.map((each) => [each.id, this.answers.get(each.id) ?? new AnswerView(each, this.actions)]));
    this.answers = views;
    for (const view of views.values()) {
      view.element.classList.toggle("chosen", this.beside && view.answer === answer);
      if (view.answer !== run?.answer) view.finish(all);
    }
    this.columns.classList.toggle("beside", this.beside && all.length > 1);
    const elements = [...views.values()].map((view) => view.element);
    if (elements.some((element, index) => this.columns.children[index] !== element) ||
      this.columns.children.length !== elements.length) this.columns.replaceChildren(...elements);
    if (run && views.has(run.answer.id)) views.get(run.answer.id).writing(run);
    if (!this.asked.querySelector(".editor")) this.showQuestion();
  }
  chooser(answer, all) {
    if (!this.beside) return switcher(all, answer, "answer", this.actions.choose);
    if (answer === this.answer) return make("span", { class: "used", text: "Used from here on" });
    return smallButton("forward", "Use this one", () => this.actions.choose(answer));
  }
  besideButton() {
    const button = smallButton("columns", this.beside ? "One at a time" : "Side by side", () => {
      this.beside = !this.beside;
      this.show(this.answer, this.run);
      this.columns.querySelector(".chosen .besides, .besides")?.focus();
    });
    button.classList.add("besides");
    return button;
  }
  showQuestion() {
    const all = siblings(this.conversation, this.question);
    // In its place while an answer is written too, so that nothing jumps when it ends.
    const row = make("div", { class: this.run ? "row away" : "row" },
      all.length > 1 ? switcher(all, this.question, "question", this.actions.choose) : null,
      smallButton("edit", "Edit", () => this.edit()));
    const spoken = make("h2", { class: "unseen", text: "Question" });
    this.asked.replaceChildren(spoken, make("div", { class: "asked", text: this.question.text }), row);
  }
  edit() {
    const box = make("textarea", { value: this.question.text, "aria-label": "Edit the question" });
    const leave = () => {
      this.showQuestion();
      this.asked.querySelector(".row > .small").focus();
    };
    const resend = () => {
      const text = box.value.trim();
      if (text && this.actions.edit(this.question, text)) this.showQuestion();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
      if (isSend(event)) { event.preventDefault(); resend(); }
    });
    this.asked.replaceChildren(make("div", { class: "editor" }, box, make("div", { class: "row" },
      textButton("plain", "Cancel", leave), textButton("strong", "Send", resend))));
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}
