// The elements for the blocks and spans of Markdown. The text comes from a model: only web addresses become links, and
// nothing is loaded.
import { copyButton, make } from "../dom.js";
import { formula } from "./formulas.js";
import { highlighted } from "./highlighting.js";
import { prettyJson } from "./json.js";

const DEEPEST = 12;
const LONGEST_COLOURED = 20000;
const LINES_IN_CHUNK = 64; // a browser lays out the chunk that changed
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

// `context.level` is the level of the last heading: the next one is at most one deeper. If the block is code,
// `context.code` becomes its `CodeBlock`.
export function block(token, context, depth = 0) {
  if (depth > DEEPEST) return [make("p", { text: token.raw })];
  const inner = (tokens) => tokens.flatMap((each) => block(each, context, depth + 1));
  switch (token.type) {
    case "space": return [];
    case "heading": return [heading(token, context)];
    case "paragraph": return [make("p", {}, ...spans(token.tokens))];
    case "text": return token.tokens ? spans(token.tokens) : [decoded(token.text)];
    case "checkbox": return [checkbox(token)];
    case "hr": return [make("hr")];
    case "blockquote": return [make("blockquote", {}, ...inner(token.tokens))];
    case "list": return [list(token, inner)];
    case "table": return [table(token)];
    case "code": return [(context.code = new CodeBlock(token)).element];
    case "formula": return [token.closed ? formula(token.source, true) : make("p", { text: token.raw })];
    default: return [make("p", { text: token.raw })];
  }
}

function heading({ depth, tokens }, context) {
  const level = Math.min(["3", "3", "4", "5", "5", "5"][depth - 1], context.level + 1);
  context.level = level;
  return make("h" + level, {}, ...spans(tokens));
}

function list({ ordered, start, items }, inner) {
  const elements = items.map(({ tokens, task }) => make("li", { class: task ? "task" : "" }, ...inner(tokens)));
  return make(ordered ? "ol" : "ul", ordered ? { start } : {}, ...elements);
}

function checkbox({ checked }) {
  const label = checked ? "Done" : "Not done";
  return make("input", { type: "checkbox", checked, disabled: true, "aria-label": label });
}

function table({ header, rows }) {
  const cell = (tag, properties) => ({ tokens, align }) =>
    make(tag, { ...properties, class: align ?? "" }, ...spans(tokens));
  const head = make("tr", {}, ...header.map(cell("th", { scope: "col" })));
  const body = rows.map((row) => make("tr", {}, ...row.map(cell("td", {}))));
  return make("div", { class: "table", tabIndex: 0, role: "group", "aria-label": "Table" },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function spans(tokens, links = true, depth = 0) {
  if (depth > DEEPEST) return tokens.map(({ raw }) => new Text(raw));
  return tokens.map((token) => span(token, links, depth));
}

function span(token, links, depth) {
  const inner = () => spans(token.tokens, links, depth + 1);
  switch (token.type) {
    case "text": return token.tokens ? make("span", {}, ...inner()) : decoded(token.text);
    case "strong": return make("strong", {}, ...inner());
    case "em": return make("em", {}, ...inner());
    case "del": return make("del", {}, ...inner());
    case "codespan": return make("code", { text: token.text });
    case "br": return make("br");
    case "escape": return new Text(token.text);
    case "checkbox": return checkbox(token);
    case "formula": return formula(token.source, token.display);
    case "link": return links ? link(token, () => spans(token.tokens, false, depth + 1)) : new Text(token.raw);
    case "image": return links ? link(token, () => [decoded(token.text || token.href)]) : new Text(token.raw);
    default: return new Text(token.raw);
  }
}

function link({ href, raw }, children) {
  const address = webAddress(href);
  if (!address) return new Text(raw);
  return make("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, ...children());
}

function webAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch { return null; }
}

function decoded(text) {
  return new Text(text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/gi, (all, tens, hex, name) => {
    if (name) return ENTITIES[name.toLowerCase()];
    const point = tens ? Number(tens) : parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : all;
  }));
}

export class CodeBlock {
  constructor(token, title = CodeBlock.languageOf(token) || "code") {
    this.language = CodeBlock.languageOf(token);
    this.text = ""; // what is copied
    this.code = make("code");
    this.title = make("span", { text: title });
    const header = make("header", {}, this.title, copyButton(() => this.text));
    this.element = make("div", { class: "block" }, header, make("pre", { tabIndex: 0 }, this.code));
    this.chunk = null; // of a text that is too long to be coloured: its last lines
    this.chunkStart = 0;
    this.update(token.text);
  }
  static languageOf({ lang }) {
    return (lang ?? "").trim().split(/\s/)[0].slice(0, 40);
  }
  update(text, copied = text + "\n") {
    this.text = copied;
    if (text.length <= LONGEST_COLOURED) {
      const pretty = this.language.toLowerCase() === "json" ? prettyJson(text) : null;
      this.code.replaceChildren(...highlighted(pretty ?? text, this.language));
    } else {
      this.appendLines(text);
    }
  }
  appendLines(text) {
    if (!this.chunk) this.code.replaceChildren();
    this.chunk ??= this.newChunk();
    for (let end; (end = endOfLines(text, this.chunkStart)) > 0; this.chunk = this.newChunk()) {
      this.chunk.data = text.slice(this.chunkStart, end);
      this.chunkStart = end;
    }
    this.chunk.data = text.slice(this.chunkStart);
  }
  newChunk() {
    const chunk = new Text("");
    this.code.append(make("span", { class: "lines" }, chunk));
    return chunk;
  }
}

function endOfLines(text, start) { // after a chunk of complete lines, or 0
  let end = start;
  for (let line = 0; line < LINES_IN_CHUNK; line++) {
    end = text.indexOf("\n", end) + 1;
    if (!end) return 0;
  }
  return end;
}
