// JSON as a person reads it. Strings and numbers stay as they were written: a parsed number may have lost digits.
const LONGEST = 20000; // characters
const DEEPEST = 40;
const PARTS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;

// One JSON object or array, indented; null for anything else.
export function prettyJson(text) {
  if (text.length > LONGEST || !/^\s*[{[]/.test(text)) return null;
  try { JSON.parse(text); } catch { return null; }
  let pretty = "", depth = 0, last = "";
  for (const [part] of text.matchAll(PARTS)) {
    const closes = part === "}" || part === "]";
    const breaks = closes ? !"{[".includes(last) : last === "{" || last === "[" || last === ",";
    if (closes) depth--;
    if (last && breaks) pretty += "\n" + "  ".repeat(depth);
    pretty += part === ":" ? ": " : part;
    if (part === "{" || part === "[") depth++;
    if (depth > DEEPEST) return null;
    last = part;
  }
  return pretty;
}

// Whether an answer begins as a JSON document does, rather than a link or a list.
export const beginsAsJson = (text) => /^\s*(?:\{\s*(?:["}]|$)|\[\s*["{])/.test(text);
