// Separates reasoning from the answer in a stream of text: <think>reasoning</think>answer.
const OPEN = "<think>";
const CLOSE = "</think>";

// The longest end of `text` that may become `tag` when more arrives.
function undecided(text, tag) {
  for (let length = Math.min(text.length, tag.length - 1); length > 0; length--) {
    if (tag.startsWith(text.slice(-length))) return length;
  }
  return 0;
}

export class ThoughtSplitter {
  constructor(answer) { // goes on where the answer stopped
    this.answer = answer;
    this.inside = Boolean(answer.tagged && answer.thought && !answer.text);
    this.decided = this.inside || Boolean(answer.text);
    this.held = "";
  }
  // Adds to the answer's `thought` and `text`. Returns whether what was text so far turned out to be the thought.
  feed(piece) {
    this.held += piece;
    if (!this.decided && !this.opens()) return false;
    if (!this.inside) return this.plain();
    const end = this.held.indexOf(CLOSE);
    const keep = end < 0 ? this.held.length - undecided(this.held, CLOSE) : end;
    this.answer.thought += this.held.slice(0, keep);
    this.held = this.held.slice(keep);
    if (end < 0) return false;
    this.inside = false;
    this.held = this.held.slice(CLOSE.length).trimStart();
    return this.plain();
  }
  opens() { // whether it is known what the text begins with
    const text = this.held.trimStart();
    if (text.length < OPEN.length && OPEN.startsWith(text)) return false;
    this.decided = true;
    if (text.startsWith(OPEN)) {
      this.inside = this.answer.tagged = true;
      this.held = text.slice(OPEN.length).trimStart();
    }
    return true;
  }
  plain() {
    if (!this.answer.text) this.held = this.held.trimStart();
    const end = this.answer.thought ? -1 : this.held.indexOf(CLOSE);
    if (end >= 0 && (this.held[end - 1] ?? this.answer.text.at(-1) ?? "\n") === "\n") { // the prompt opened the thought
      Object.assign(this.answer, { thought: this.answer.text + this.held.slice(0, end), text: "", tagged: true });
      this.held = this.held.slice(end + CLOSE.length).trimStart();
      this.plain();
      return true;
    }
    const keep = this.held.length - (this.answer.thought ? 0 : undecided(this.held, CLOSE));
    this.answer.text += this.held.slice(0, keep);
    this.held = this.held.slice(keep);
    return false;
  }
  finish() {
    if (this.inside) this.answer.thought += this.held;
    else this.answer.text += this.held;
    this.held = "";
  }
}
