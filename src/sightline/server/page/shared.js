"use strict";
// The theme comes before the first paint; everything else waits for the document.
const THEME = "sightline.theme";
const KEY = "sightline.key"; // in sessionStorage only: it goes with the tab
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function stored(area, key) {
  try { return window[area].getItem(key); } catch { return null; }
}
function store(area, key, value) {
  try {
    if (value === null) window[area].removeItem(key); else window[area].setItem(key, value);
    return true;
  } catch { return false; }
}
function applyTheme() {
  const chosen = stored("localStorage", THEME);
  const theme = chosen === "dark" || chosen === "light" ? chosen : systemIsDark.matches ? "dark" : "light";
  document.documentElement.dataset.theme = theme;
  document.querySelector("meta[name=theme-color]").content = theme === "dark" ? "#181d1c" : "#ffffff";
}
function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  const asSystem = (next === "dark") === systemIsDark.matches;
  if (!store("localStorage", THEME, asSystem ? null : next)) document.documentElement.dataset.theme = next;
  else applyTheme();
}
applyTheme();
systemIsDark.addEventListener("change", applyTheme);

// ---- DOM: text goes in as text, never as markup.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", "#icon-" + name);
  svg.append(use);
  return svg;
}
function say(text) { // for screen readers
  document.getElementById("status").textContent = text;
}
async function copyText(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // the clipboard needs https or localhost
    const holder = make("textarea", { class: "unseen", value: text, "aria-hidden": "true" });
    document.body.append(holder);
    holder.select();
    copied = document.execCommand("copy");
    holder.remove();
    button.focus();
  }
  const label = button.querySelector("span");
  label.textContent = copied ? "Copied" : "Could not copy";
  say(label.textContent);
  setTimeout(() => { label.textContent = "Copy"; }, 1600);
}
