// The page of the API, drawn from /openapi.json.
import { copyText, icon, make } from "./dom.js";
import { KEY, store, stored } from "./local.js";

function withCode(text) { // `code` in a description
  return String(text).split(/`([^`]+)`/).map((part, index) => (index % 2 ? make("code", { text: part }) : part));
}

// ---- What a schema says
let components = {};
const METHODS = ["get", "post", "put", "patch", "delete", "head", "options"];
const nameOf = (reference) => decodeURIComponent(reference.split("/").at(-1));

function resolve(schema, depth = 0) {
  if (!schema?.$ref || depth > 8) return schema ?? {};
  return resolve(components.schemas?.[nameOf(schema.$ref)], depth + 1);
}
function branches(schema) {
  return schema.anyOf ?? schema.oneOf ?? [];
}
function typeOf(schema, depth = 0) { // nodes and text
  if (schema === true || !schema) return ["anything"];
  if (schema.$ref) return [make("a", { href: "#schema-" + nameOf(schema.$ref), text: nameOf(schema.$ref) })];
  if (depth > 4) return ["…"];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" | ")];
  const options = branches(schema).length ? branches(schema) : null;
  if (options) return options.flatMap((each, index) => [...(index ? [" or "] : []), ...typeOf(each, depth + 1)]);
  if (schema.allOf?.length === 1) return typeOf(schema.allOf[0], depth + 1);
  const types = [schema.type ?? (schema.properties ? "object" : "anything")].flat();
  return types.flatMap((type, index) => [...(index ? [" or "] : []), ...plainType(type, schema, depth)]);
}
function plainType(type, schema, depth) {
  if (type === "array") return ["array of ", ...typeOf(schema.items, depth + 1)];
  const values = schema.additionalProperties;
  if (type === "object" && typeof values === "object") return ["map to ", ...typeOf(values, depth + 1)];
  return [type];
}
function rangeOf(schema) {
  const parts = [];
  for (const each of [schema, ...branches(schema), ...(schema.allOf ?? [])]) {
    const { minimum, maximum, exclusiveMinimum: above, exclusiveMaximum: below } = each;
    const { minLength, maxLength, minItems, maxItems, pattern } = each;
    if (above !== undefined) parts.push(`above ${above}`);
    if (minimum !== undefined) parts.push(maximum === undefined ? `at least ${minimum}` : `${minimum} to ${maximum}`);
    if (maximum !== undefined && minimum === undefined) parts.push(`at most ${maximum}`);
    if (below !== undefined) parts.push(`below ${below}`);
    if (minLength !== undefined) parts.push(`at least ${minLength} characters`);
    if (maxLength !== undefined) parts.push(`at most ${maxLength} characters`);
    if (minItems !== undefined) parts.push(`at least ${minItems} of them`);
    if (maxItems !== undefined) parts.push(`at most ${maxItems} of them`);
    if (pattern !== undefined) parts.push(`matches ${pattern}`);
  }
  return parts.join(", ");
}
const rowOf = (name, schema, required, description, place = "") => ({ name, schema, required, description, place });

function propertiesOf(schema) {
  const whole = resolve(schema);
  const parts = [whole, ...(whole.allOf ?? []).map((each) => resolve(each))];
  return parts.flatMap((part) => Object.entries(part.properties ?? {}).map(([name, each]) =>
    rowOf(name, each, (part.required ?? []).includes(name), each.description ?? resolve(each).description ?? "")));
}
function table(heads, rows) {
  const head = make("tr", {}, heads.map((text) => make("th", { scope: "col", text })));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, rows));
}
const detail = (...children) => make("span", { class: "detail" }, ...children);

function parameterTable(rows) {
  const line = ({ name, schema, required, description, place }) => {
    const range = rangeOf(schema);
    const fallback = schema.default === undefined ? null : make("code", { text: JSON.stringify(schema.default) });
    const needed = required ? make("span", { class: "needed", text: "required" }) : null;
    return make("tr", {},
      make("td", { class: "name" }, make("code", { text: name }), place ? detail("in " + place) : null, needed),
      make("td", { class: "type" }, typeOf(schema), range ? detail(range) : null, fallback && detail("default ", fallback)),
      make("td", {}, withCode(description)));
  };
  return table(["Name", "Type, range and default", "Meaning"], rows.map(line));
}

// ---- One route
function bodySchema(operation) {
  return operation.requestBody?.content?.["application/json"] ?? null;
}
function sample(schema, name = "", depth = 0) {
  const whole = resolve(schema);
  if (whole.example !== undefined) return whole.example;
  if (whole.examples?.length) return whole.examples[0];
  if (whole.const !== undefined) return whole.const;
  if (whole.enum) return whole.enum.includes("user") ? "user" : whole.enum[0];
  const options = branches(whole).filter((each) => each.type !== "null");
  if (options.length) return sample(options[0], name, depth + 1);
  if (whole.default !== undefined && whole.default !== null) return whole.default;
  const type = [whole.type ?? (whole.properties ? "object" : "string")].flat()[0];
  if (depth > 5) return null;
  if (type === "array") return [sample(whole.items, name, depth + 1)];
  if (type === "object") {
    const needed = propertiesOf(whole).filter((row) => row.required);
    return Object.fromEntries(needed.map((row) => [row.name, sample(row.schema, row.name, depth + 1)]));
  }
  if (type === "integer" || type === "number") return whole.minimum ?? 1;
  if (type === "boolean") return false;
  return name === "model" ? "MODEL" : "Hello";
}
function curlFor(method, path, operation) {
  const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
  const parts = [`curl ${method === "get" ? "" : "-X " + method.toUpperCase() + " "}${location.origin}${path}`];
  if (!isOpen(operation)) parts.push(`-H "Authorization: Bearer $SIGHTLINE_API_KEY"`);
  const body = bodySchema(operation);
  if (body) {
    const given = body.example ?? Object.values(body.examples ?? {})[0]?.value ?? sample(body.schema);
    parts.push("-H 'Content-Type: application/json'", "-d " + quoted(JSON.stringify(given, null, 2)));
  }
  return parts.join(" \\\n  ");
}
const isOpen = (operation) => operation["x-access"] === "public";

function responseTable(responses) {
  const line = ([status, { $ref, description = "", content = {} }]) => {
    const shapes = Object.entries(content).map(([kind, { schema }]) => detail(kind, schema ? [": ", ...typeOf(schema)] : []));
    const words = withCode(description || ($ref ? nameOf($ref) : ""));
    return make("tr", {}, make("td", { class: "status" }, make("code", { text: status })), make("td", {}, words, shapes));
  };
  return table(["Status", "Answer"], Object.entries(responses).map(line));
}
const identify = (method, path) => (method + path).replace(/[^\w]+/g, "-").toLowerCase();

function badge(method) {
  return make("span", { class: method === "get" ? "method" : "method writes", text: method.toUpperCase() });
}
function curlBlock(path, command) {
  const label = `Copy the curl command of ${path}`;
  const copy = make("button", { type: "button", class: "small", "aria-label": label }, icon("copy"), make("span", { text: "Copy" }));
  copy.addEventListener("click", () => copyText(command, copy));
  const code = make("pre", { tabIndex: 0, role: "region", "aria-label": `curl for ${path}` }, make("code", { text: command }));
  return make("div", { class: "curl" }, make("header", {}, make("span", { text: "curl" }), copy), code);
}
function routeCard(method, path, operation, shared) {
  const access = operation["x-access"];
  const words = isOpen(operation) ? "open to all" : `access: ${access}`;
  const rows = [...shared, ...(operation.parameters ?? [])].map((each) =>
    rowOf(each.name, each.schema ?? {}, each.required, each.description ?? "", each.in));
  const body = bodySchema(operation);
  const fields = body ? propertiesOf(body.schema) : [];
  return make("article", { class: "card", id: identify(method, path) },
    make("h3", { class: "route" }, badge(method), make("code", { text: path }), access ? make("span", { class: "access", text: words }) : null),
    operation.summary ? make("p", { class: "summary" }, withCode(operation.summary)) : null,
    operation.description ? make("p", { class: "about" }, withCode(operation.description)) : null,
    rows.length ? [make("h4", { text: "Parameters" }), parameterTable(rows)] : [],
    body ? [make("h4", {}, "Body: ", ...typeOf(body.schema)), fields.length ? parameterTable(fields) : null] : [],
    operation.responses ? [make("h4", { text: "Responses" }), responseTable(operation.responses)] : [],
    curlBlock(path, curlFor(method, path, operation)));
}
function schemaCard([name, schema]) {
  const rows = propertiesOf(schema);
  return make("article", { class: "card", id: "schema-" + name },
    make("h3", { class: "route" }, make("code", { text: name })),
    schema.description ? make("p", { class: "about" }, withCode(schema.description)) : null,
    rows.length ? parameterTable(rows) : make("p", { class: "about" }, ...typeOf(schema)));
}

// ---- The page
function groupsOf(paths) {
  const groups = new Map();
  for (const [path, item] of Object.entries(paths ?? {})) {
    for (const method of METHODS.filter((each) => item[each])) {
      const group = item[method].tags?.[0] ?? "Routes";
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push([method, path, item[method], item.parameters ?? []]);
    }
  }
  return groups;
}
function show(spec) {
  components = spec.components ?? {};
  const { info = {} } = spec;
  const about = document.getElementById("about");
  const version = info.version ? ` Version ${info.version}.` : "";
  about.replaceChildren(...withCode(info.description || "Every route of this server."), version);
  const routes = document.getElementById("routes");
  const contents = document.getElementById("contents");
  routes.replaceChildren();
  contents.replaceChildren();
  const entry = (id, text, mark = null) => make("a", { href: "#" + id }, mark, make("code", { text }));
  const section = (title, cards, links) => {
    routes.append(make("section", { class: "group" }, make("h2", { text: title }), ...cards));
    contents.append(make("h2", { text: title }), make("ul", {}, ...links.map((link) => make("li", {}, link))));
  };
  for (const [group, operations] of groupsOf(spec.paths)) {
    section(group, operations.map((each) => routeCard(...each)),
      operations.map(([method, path]) => entry(identify(method, path), path, badge(method))));
  }
  const schemas = Object.entries(components.schemas ?? {});
  if (schemas.length) section("Schemas", schemas.map(schemaCard), schemas.map(([name]) => entry("schema-" + name, name)));
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}
async function load() {
  const trouble = document.getElementById("trouble");
  trouble.hidden = true;
  const key = stored("sessionStorage", KEY);
  try {
    const headers = key ? { authorization: "Bearer " + key } : {};
    const response = await fetch("/openapi.json", { cache: "no-store", headers });
    document.getElementById("key-form").hidden = response.status !== 401;
    const body = await response.json();
    if (!response.ok) throw new Error(body.error?.message ?? `HTTP ${response.status}`);
    show(body);
  } catch (error) {
    trouble.hidden = false;
    const gone = error instanceof TypeError;
    document.getElementById("trouble-message").textContent = gone ? `No answer from ${location.host}.` : error.message;
  }
}
document.getElementById("retry").addEventListener("click", load);
document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  store("sessionStorage", KEY, document.getElementById("key").value.trim() || null);
  document.getElementById("key").value = "";
  load();
});
load();
