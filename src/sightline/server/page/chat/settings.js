// The settings dialog, the list of models, and the body of a request that follows from them.
import { byId, make, say } from "../dom.js";
import { store, stored } from "../local.js";
import { Failure, hasKey, request, setKey } from "./api.js";
import { notify } from "./notices.js";

const SETTINGS = "sightline.settings";
const NUMBERS = { // the ranges that the engine takes
  temperature: { label: "Temperature", least: 0, most: 10000 },
  top_p: { label: "Top-p", least: 0, most: 1, above: true },
  top_k: { label: "Top-k", least: 0, most: 2147483647, whole: true },
  min_p: { label: "Min-p", least: 0, most: 1 },
  repetition_penalty: { label: "Repetition penalty", least: 0.0001, most: 10000 },
  max_tokens: { label: "Longest answer", least: 1, most: 2147483647, whole: true },
  seed: { label: "Seed", least: 0, most: 18446744073709551615n, whole: true },
};
const CONTROLS = [...Object.keys(NUMBERS), "stop", "system"];
const fieldOf = (name) => byId(name === "stop" ? "stop-text" : name); // "stop" alone is the button
const TOOLS_REFUSED = "Not offered: ";
let models = [];
let toolsRefusal = ""; // why the server refuses tools, if it does
let settings = {};

function parseNumber(name, typed) {
  const { label, least, most, whole, above } = NUMBERS[name];
  const text = typed.trim().replace(",", ".");
  const pattern = whole ? /^\d{1,20}$/ : /^(\d+\.?\d*|\.\d+)(e-?\d{1,2})?$/i;
  const number = whole && pattern.test(text) ? BigInt(text) : Number(text);
  const within = number <= most && (above ? number > least : number >= least);
  if (pattern.test(text) && within) return { text: String(number) };
  const kind = whole ? "a whole number" : "a number";
  const range = number > most && most > 1 ? `at most ${most}` : most > 1 ? `${least} or more`
    : above ? `above ${least} and up to ${most}` : `${least} to ${most}`;
  return { wrong: `${label} is ${kind}, ${range}. Leave it empty for the model's default.` };
}

function checkSettings() { // shows what is wrong with each; returns the first field with a wrong value
  let first = null;
  for (const name of Object.keys(NUMBERS)) {
    const field = byId(name);
    const { wrong = "" } = field.value.trim() ? parseNumber(name, field.value) : {};
    field.setAttribute("aria-invalid", String(Boolean(wrong)));
    byId(name + "-wrong").textContent = wrong;
    byId(name + "-wrong").hidden = !wrong;
    if (wrong) first ??= field;
  }
  return first;
}

function settingsChanged() {
  settings = Object.fromEntries([...CONTROLS, "model"].map((name) => [name, fieldOf(name).value]));
  settings.tools = byId("tools").checked ? "on" : "";
  const kept = store("localStorage", SETTINGS, JSON.stringify(settings));
  notify("settings", kept ? "" : "This browser does not keep the settings: they last until the page is closed.");
  refuseTools(toolsRefusal);
  checkSettings();
  showSettings();
}

function showSettings() {
  const set = [...CONTROLS, "tools"].filter((name) => settings[name]?.trim());
  byId("set").hidden = !set.length;
  byId("set").textContent = set.length;
  byId("open-settings").setAttribute("aria-label", set.length ? `Settings, ${set.length} changed` : "Settings");
  byId("model-name").textContent = currentModel()?.id ?? "";
}

function loadSettings() {
  try { settings = JSON.parse(stored("localStorage", SETTINGS)) ?? {}; } catch { settings = {}; }
  for (const name of CONTROLS) {
    if (typeof settings[name] !== "string") settings[name] = "";
    fieldOf(name).value = settings[name];
  }
  settings.tools = settings.tools === "on" ? "on" : "";
  byId("tools").checked = settings.tools === "on";
  checkSettings();
  showSettings();
}

function resetSettings() {
  for (const name of CONTROLS) fieldOf(name).value = "";
  byId("tools").checked = false;
  settingsChanged();
  say("All settings are the model's defaults.");
}

function openSettings(focus = null) {
  byId("forget-key").hidden = !hasKey();
  byId("settings").showModal();
  (focus ?? byId("close-settings")).focus();
}

function forgetKey() {
  setKey("");
  byId("forget-key").hidden = true;
  say("The API key is forgotten.");
}

export function settingsAreRight() { // opens the dialog at what is wrong
  const wrong = checkSettings();
  if (wrong) openSettings(wrong);
  return !wrong;
}

export const offersTools = () => settings.tools === "on" && !toolsRefusal;

// Says next to the switch, and above the question box if it is on, why tools are not offered.
export function refuseTools(reason) {
  toolsRefusal = reason;
  byId("tools-wrong").textContent = TOOLS_REFUSED + reason;
  byId("tools-wrong").hidden = !reason;
  byId("tools").disabled = Boolean(reason) && !byId("tools").checked; // on, it can still be switched off
  notify("tools", reason && settings.tools === "on" ? `Tools are switched on in the settings. ${TOOLS_REFUSED}${reason}` : "");
}

export const currentModel = () => models.find((model) => model.id === settings.model) ?? models[0];

export async function loadModels(signal) {
  const list = await (await request("/v1/models", { signal })).json();
  models = Array.isArray(list.data) ? list.data : [];
  if (!models.length) throw new Failure("The server lists no model.", { title: "No model" });
  const select = byId("model");
  select.replaceChildren(...models.map((model) => make("option", { value: model.id, text: model.id })));
  select.value = currentModel().id;
  byId("model-field").hidden = models.length < 2;
  for (const place of document.querySelectorAll("[data-model]")) place.textContent = currentModel().id;
  document.title = currentModel().id + " · Sightline";
  notify("models", "");
  // A server that does not tell may still refuse the request.
  const info = await request("/server_info", { signal }).then((response) => response.json()).catch(() => null);
  refuseTools(info?.tools_refusal ?? "");
  showSettings();
}

export function forgetModels() { // the server may have others by now
  models = [];
}

export function requestBody(messages, more) {
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const streaming = { stream: true, stream_options: { include_usage: true } };
  const body = { model: currentModel().id, messages: [...system, ...messages], ...streaming, ...more };
  const stop = (settings.stop ?? "").split("\n").filter(Boolean).map((text) => text.replace(/\\n/g, "\n"));
  if (stop.length) body.stop = stop;
  const set = Object.keys(NUMBERS).filter((name) => settings[name]?.trim());
  // Spliced in as text: a seed has more digits than a number here can hold.
  const numbers = set.map((name) => `,"${name}":${parseNumber(name, settings[name]).text}`);
  return JSON.stringify(body).slice(0, -1) + numbers.join("") + "}";
}

export function startSettings() {
  const on = (id, type, action) => byId(id).addEventListener(type, action);
  loadSettings();
  on("open-settings", "click", () => openSettings());
  on("close-settings", "click", () => byId("settings").close());
  on("settings", "click", (event) => { if (event.target === byId("settings")) byId("settings").close(); });
  on("settings-form", "submit", (event) => { event.preventDefault(); byId("settings").close(); });
  on("settings-form", "input", settingsChanged);
  on("reset", "click", resetSettings);
  on("forget-key", "click", forgetKey);
}
