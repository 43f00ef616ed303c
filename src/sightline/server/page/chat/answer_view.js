// One answer on the page: its rounds, of which the last has its text, its numbers, and what can be done with it.
import { copyButton, iconButton, make, smallButton, textButton } from "../dom.js";
import { BROKEN } from "./api.js";
import { hasContent } from "./conversation.js";
import { RoundView } from "./round_view.js";

const PAUSE = 3; // a frame that took long is followed by a pause of so many times its length

export class AnswerView {
  // `actions`: again and goOn, each with an answer; grown, when it got longer; chooser and besideButton, which make
  // the controls for several answers.
  constructor(answer, actions) {
    Object.assign(this, { answer, actions });
    this.earlier = make("div");
    this.below = make("div", { class: "below" });
    this.last = new RoundView();
    this.element = make("article", { class: "answer", "aria-label": "Answer" },
      make("h2", { class: "unseen", text: "Answer" }), this.earlier, this.last.parts, this.below);
    this.timer = 0;
    this.paintedAt = this.cost = 0;
  }
  writing(run) { // called when the run begins, and when its conversation is opened again
    if (!this.answer.text && !this.answer.thought) this.last.reset();
    if (!this.answer.rounds.length) this.earlier.replaceChildren();
    this.element.setAttribute("aria-busy", "true");
    this.paint();
    this.tick(run);
  }
  changed(moved) {
    if (moved) this.last.reset();
    if (this.timer) return;
    const wait = this.cost * PAUSE - (performance.now() - this.paintedAt);
    const next = () => requestAnimationFrame(() => { this.timer = 0; this.paint(); });
    this.timer = wait > 0 ? setTimeout(next, wait) : next();
  }
  feed() {
    const { rounds } = this.answer;
    for (let at; (at = this.earlier.childElementCount) < rounds.length;) {
      this.last.feed(rounds[at], false);
      this.last.finish();
      this.last.text.className = "text";
      this.earlier.append(make("div", { class: "step" }, this.last.parts));
      this.last = new RoundView();
      this.below.before(...this.last.parts);
    }
    const isWriting = this.answer.state === "writing";
    this.last.feed(this.answer, isWriting);
    this.last.text.className = isWriting ? "text writing" : "text";
  }
  paint() {
    if (this.answer.state !== "writing") return;
    const started = performance.now();
    this.feed();
    this.last.draw();
    if (this.below.firstChild?.classList.contains("waiting")) this.below.replaceChildren();
    this.actions.grown();
    this.paintedAt = performance.now();
    this.cost = this.paintedAt - started;
  }
  tick(run) {
    const seconds = (performance.now() - run.asked) / 1000;
    if (!run.first) {
      const words = "Waiting for the first token" + (seconds >= 2 ? ` · ${Math.floor(seconds)} s` : "");
      const pulse = make("i", { class: "pulse" });
      this.below.replaceChildren(make("div", { class: "state waiting" }, pulse, make("span", { text: words })));
    } else if (!this.timer) {
      const { rate, wait } = run.statistics();
      const speed = rate ? [`about ${rate.toFixed(1)} tokens/s`] : [];
      this.below.replaceChildren(factsLine(["Writing", ...speed, `first token ${inSeconds(wait)}`]));
    }
    this.actions.grown();
  }
  finish(siblings) { // the answer is whole, or kept from before
    this.feed();
    this.last.finish();
    this.element.removeAttribute("aria-busy");
    this.show(siblings);
  }
  show(siblings) { // what is below the text
    clearInterval(this.countdown);
    const { answer, actions } = this;
    const bad = answer.state === "failed" || answer.state === "broken";
    const row = make("div", { class: "row" });
    if (siblings.length > 1) row.append(actions.chooser(answer, siblings));
    if (answer.text) row.append(copyButton(() => answer.text));
    if (!bad) row.append(smallButton("again", hasContent(answer) ? "Regenerate" : "Retry", () => actions.again(answer)));
    if (canGoOn(answer) && !bad) row.append(smallButton("forward", "Continue", () => actions.goOn(answer)));
    if (siblings.length > 1) row.append(actions.besideButton());
    if (answer.sampling) row.append(samplingDetails(answer.sampling));
    this.below.replaceChildren(...[bad ? this.trouble() : null, facts(answer), row].filter(Boolean));
  }
  trouble() {
    const { answer, actions } = this;
    const mild = [401, 429, 503].includes(answer.status) || !answer.title;
    const retry = textButton("plain", "Retry", () => actions.again(answer));
    const goOn = canGoOn(answer) ? textButton("plain", "Continue", () => actions.goOn(answer)) : null;
    this.countDown(retry);
    const left = answer.text ? null : make("p", { text: "Later questions leave this one out." });
    return make("div", { class: mild ? "trouble mild" : "trouble" }, make("b", { text: answer.title || BROKEN }),
      make("p", { text: answer.message || "This is not the whole answer." }), answer.shown ? left : null,
      make("div", { class: "row" }, retry, goOn));
  }
  countDown(retry) {
    const step = () => {
      const left = Math.ceil(((this.answer.retryAt ?? 0) - Date.now()) / 1000);
      retry.disabled = left > 0;
      retry.textContent = left > 0 ? `Retry in ${left} s` : "Retry";
      if (left <= 0) clearInterval(this.countdown);
    };
    this.countdown = setInterval(step, 250);
    step();
  }
}

function canGoOn({ text, thought, tagged, rounds, state, finish }) {
  // Reasoning that the server told apart cannot be handed back to be continued.
  const isOpen = state !== "done" || finish === "length" || finish === "tool_calls";
  return isOpen && Boolean(text || (tagged && thought) || rounds.length);
}

// ‹ 2/3 › between messages of which one is shown.
export function switcher(siblings, shown, what, choose) {
  const at = siblings.indexOf(shown);
  const step = (name, label, index) => {
    const button = iconButton(name, `${label} ${what}`, () => choose(siblings[index]));
    button.disabled = !siblings[index];
    return button;
  };
  return make("span", { class: "switcher", role: "group", "aria-label": `Choose the ${what}` },
    step("left", "Previous", at - 1), make("span", { text: `${at + 1}/${siblings.length}` }), step("right", "Next", at + 1));
}

const inSeconds = (milliseconds) => (milliseconds / 1000).toFixed(milliseconds < 9950 ? 2 : 1) + " s";
const count = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;

function facts({ state, stats, finish, rounds }) {
  const parts = [];
  if (state === "stopped") parts.push(stats ? "Stopped" : "Stopped before the first token");
  if (finish === "length" && state === "done") parts.push("Cut at the longest answer allowed");
  else if (finish === "tool_calls" && state === "done" && rounds.length) parts.push(`Paused after ${rounds.length} rounds of calls`);
  else if (finish && finish !== "stop" && state === "done") parts.push(`Ended by the server: ${finish}`);
  if (stats) {
    const about = stats.exact ? "" : "about ";
    if (stats.rate) parts.push(`${about}${stats.rate.toFixed(1)} tokens/s`);
    parts.push(`first token ${inSeconds(stats.wait)}`, about + count(stats.tokens, "token"));
    const cached = stats.cached === null ? "" : `, ${stats.cached.toLocaleString("en")} cached`;
    if (stats.prompt !== null) parts.push(`prompt ${count(stats.prompt, "token")}${cached}`);
  }
  return parts.length ? factsLine(parts) : null;
}

function factsLine(parts) {
  return make("div", { class: "facts" }, ...parts.map((text) => make("span", { text })));
}

function samplingDetails(header) {
  let values;
  try { values = JSON.parse(header); } catch { values = { sampling: header }; }
  // Numbers as they were sent: a seed has more digits than a number here can hold.
  const sent = (name) => new RegExp(`"${name}"\\s*:\\s*(-?[\\d.eE+-]+)`).exec(header)?.[1];
  const rows = Object.entries(values ?? {}).map(([name, value]) => {
    const text = (typeof value === "number" && sent(name)) || (typeof value === "string" ? value : JSON.stringify(value));
    return make("div", {}, make("dt", { text: name }), make("dd", { text }));
  });
  return make("details", { class: "sampling" }, make("summary", { text: "Sampling" }), make("dl", {}, ...rows));
}
