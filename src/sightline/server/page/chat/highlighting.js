// Colours for code, by highlight.js.
import { make } from "../dom.js";
import hljs from "../vendor/highlight/core.min.js";
import bash from "../vendor/highlight/bash.min.js";
import c from "../vendor/highlight/c.min.js";
import cpp from "../vendor/highlight/cpp.min.js";
import css from "../vendor/highlight/css.min.js";
import diff from "../vendor/highlight/diff.min.js";
import go from "../vendor/highlight/go.min.js";
import java from "../vendor/highlight/java.min.js";
import javascript from "../vendor/highlight/javascript.min.js";
import json from "../vendor/highlight/json.min.js";
import python from "../vendor/highlight/python.min.js";
import rust from "../vendor/highlight/rust.min.js";
import shell from "../vendor/highlight/shell.min.js";
import sql from "../vendor/highlight/sql.min.js";
import typescript from "../vendor/highlight/typescript.min.js";
import xml from "../vendor/highlight/xml.min.js";
import yaml from "../vendor/highlight/yaml.min.js";

const LANGUAGES = {
  bash, c, cpp, css, diff, go, java, javascript, json, python, rust, shell, sql, typescript, xml, yaml,
};
for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);

export function highlighted(text, language) { // nodes
  if (!hljs.getLanguage(language)) return [new Text(text)];
  const result = hljs.highlight(text, { language, ignoreIllegals: true });
  // As a tree: `result.value` is markup, which this page never parses.
  return result.errorRaised ? [new Text(text)] : nodesOf(result._emitter.rootNode);
}

function nodesOf({ children }) {
  return children.map((child) => (typeof child === "string" ? new Text(child) : spanOf(child)));
}

function spanOf(node) {
  const name = (node.scope ?? "").split(".").map((part) => "code-" + part).join(" ");
  return make("span", node.scope ? { class: name } : {}, ...nodesOf(node));
}
