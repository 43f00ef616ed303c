// Markdown that arrives in pieces. Blocks that are complete are drawn once; the open block at the end is drawn again
// with each frame. Long blocks are cut, so the work for a frame is bounded, whatever a model writes.
import { make } from "../dom.js";
import { block, CodeBlock } from "./elements.js";
import { tokensOf } from "./grammar.js";

const LONGEST = 4000; // characters of a block that is drawn again and again
const LONGEST_NESTED = 20000; // of quotations, tables and items of lists, which cannot be cut everywhere
const WINDOW = 8192; // characters that are looked at in one go
const BLOCKS_IN_PART = 32; // a browser lays out what changed, and looks at each neighbour of it
const UNDECIDED = /^\s*(?:[-*+_>=|]+|#{1,6}|\d{1,9}[.)]?|`{1,2}|~{1,2})\s*$/; // a line that may become anything
const FENCE = /^\s*(?:`{3}|~{3})/;
const FENCE_LINE = /^\s*(?:`+|~+)\s*$/;

export class Markdown {
  constructor(body) {
    this.body = body;
    this.part = body.appendChild(make("div", { class: "part" }));
    this.tail = ""; // from the beginning of the open block
    this.looked = 0; // length of the tail that has been searched for complete blocks
    this.open = []; // what is drawn for the tail
    this.code = null; // the block of code in it, if it is one
    this.context = { level: 2 };
  }
  feed(text) {
    this.tail += text;
  }
  draw() {
    const lastLine = this.tail.slice(this.tail.lastIndexOf("\n") + 1);
    this.settle(lastLine.length);
    const undecided = FENCE.test(this.tail) ? FENCE_LINE : UNDECIDED;
    this.show(this.tail.slice(0, this.tail.length - (undecided.test(lastLine) ? lastLine.length : 0)));
  }
  finish() {
    this.settle(0);
    this.show(this.tail);
  }
  // Draws complete blocks for good. The last `open` characters belong to a line that is not complete.
  settle(open) {
    this.cutLine();
    if (this.tail.length - open <= this.looked) return;
    for (let size = WINDOW; ;) {
      const end = this.tail.length - open;
      const window = this.tail.slice(0, size < end ? this.tail.lastIndexOf("\n", size) + 1 || size : Math.max(end, 0));
      const { taken, repeated = "" } = this.take(tokensOf(window));
      this.tail = repeated + this.tail.slice(taken);
      this.cutLine();
      if (!taken && size >= end) break;
      if (!taken) size *= 2;
    }
    this.looked = Math.max(this.tail.length - open, 0);
  }
  cutLine() { // a line without an end
    for (;;) {
      const end = this.tail.indexOf("\n");
      if ((end < 0 ? this.tail.length : end) <= LONGEST) return;
      const cut = cutBefore(this.tail, LONGEST);
      for (const token of tokensOf(this.tail.slice(0, cut))) this.put(token);
      this.tail = this.tail.slice(cut);
      this.looked = 0;
    }
  }
  // Draws all but the last block for good. Returns how many characters that took, and what the rest begins with again.
  take(tokens) {
    const last = tokens.findLastIndex((token) => token.type !== "space");
    let taken = 0;
    for (const [index, token] of tokens.entries()) {
      if (token.raw.length > longest(token)) {
        if (taken) return { taken };
        return this.takePart(token);
      }
      if (index >= last) break;
      this.put(token);
      taken += token.raw.length;
    }
    return { taken };
  }
  takePart(token) {
    const taken = token.type === "list" && firstItems(token) || cutBefore(token.raw, longest(token));
    for (const part of tokensOf(token.raw.slice(0, taken))) this.put(part);
    if (token.type !== "table") return { taken };
    const repeated = /^.*\n.*\n/.exec(token.raw)[0]; // the table goes on under the same heads
    return repeated.length < taken ? { taken, repeated } : { taken };
  }
  put(token) {
    this.clear();
    if (this.part.childElementCount >= BLOCKS_IN_PART) {
      this.part = this.body.appendChild(make("div", { class: "part" }));
    }
    this.part.append(...block(token, this.context));
  }
  show(text) {
    const tokens = tokensOf(text);
    if (this.code && tokens[0]?.type === "code" && this.code.language === CodeBlock.languageOf(tokens[0])) {
      this.code.update(tokens[0].text);
      return;
    }
    this.clear();
    const context = { ...this.context };
    this.open = tokens.flatMap((token) => block(token, context));
    this.code = context.code ?? null;
    this.part.append(...this.open);
  }
  clear() {
    for (const node of this.open) node.remove();
    this.open = [];
    this.code = null;
  }
}

function longest({ type, items }) {
  if (type === "code") return Infinity; // drawn line by line
  const nested = type === "blockquote" || type === "table" || (type === "list" && items.length === 1);
  return nested ? LONGEST_NESTED : LONGEST;
}

function firstItems({ items }) { // characters of the items that fit; 0 if the first does not
  let size = 0;
  for (const { raw } of items) {
    if (size + raw.length > LONGEST) break;
    size += raw.length;
  }
  return size;
}

function cutBefore(text, limit) { // after a line or a blank if there is one, and never inside of a character
  const cut = text.lastIndexOf("\n", limit - 1) + 1 || text.lastIndexOf(" ", limit - 1) + 1;
  if (cut > 0) return cut;
  return /[\uD800-\uDBFF]/.test(text[limit - 1]) ? limit - 1 : limit;
}
