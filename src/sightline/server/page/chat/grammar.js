// What Markdown is here: GitHub's, with formulas between $…$, $$…$$, \(…\) and \[…\], and without HTML.
import { Marked } from "../vendor/marked/marked.esm.js";

const LONGEST_FORMULA = 2000;
const ADDRESS = /^https?:\/\/[^\s<>"'`\])}*|]+/;
// A formula on lines of its own; an open one reaches to the end. No line in it is blank.
const FORMULA_BLOCK = /^ {0,3}(?:\$\$((?:(?!\n[ \t]*\n)[^$])*)(\$\$|$)|\\\[((?:(?!\n[ \t]*\n|\\\])[\s\S])*)(\\\]|$))[ \t]*(?:\n|$)/;
const FORMULA = new RegExp(
  `^(?:\\$\\$((?:[^$\\\\]|\\\\.){1,${LONGEST_FORMULA}}?)\\$\\$` + // $$…$$
  `|\\$(?![\\s$])((?:[^$\\\\\\n]|\\\\.){1,${LONGEST_FORMULA}}?)(?<!\\s)\\$(?![\\w$])` + // $…$, but not "$5 and $10"
  `|\\\\\\((.{1,${LONGEST_FORMULA}}?)\\\\\\)` + // \(…\)
  `|\\\\\\[([\\s\\S]{1,${LONGEST_FORMULA}}?)\\\\\\])`); // \[…\]

const blockFormula = {
  name: "formula",
  level: "block",
  tokenizer(text) {
    const match = FORMULA_BLOCK.exec(text);
    if (!match) return undefined;
    return { type: "formula", raw: match[0], source: match[1] ?? match[3], closed: Boolean(match[2] || match[4]), display: true };
  },
};
const inlineFormula = {
  name: "inlineFormula",
  level: "inline",
  start: (text) => text.match(/\$|\\[([]/)?.index,
  tokenizer(text) {
    const match = FORMULA.exec(text);
    if (!match) return undefined;
    const display = match[1] ?? match[4];
    const source = display ?? match[2] ?? match[3];
    return { type: "formula", raw: match[0], source, closed: true, display: display !== undefined };
  },
};

const none = () => undefined;
const marked = new Marked({
  gfm: true,
  tokenizer: {
    html: none, // HTML is text
    tag: none,
    def: none, // a definition far below would change what is drawn above
    url(text) {
      const href = ADDRESS.exec(text)?.[0].replace(/[.,;:!?]+$/, "");
      return href && { type: "link", raw: href, href, text: href, tokens: [{ type: "text", raw: href, text: href }] };
    },
  },
});
marked.use({ extensions: [blockFormula, inlineFormula] });

export function tokensOf(text) {
  try {
    return marked.lexer(text);
  } catch { // nested too deeply
    return [{ type: "paragraph", raw: text, tokens: [{ type: "escape", raw: text, text }] }];
  }
}
