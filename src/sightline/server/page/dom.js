// Building elements. Text goes in as text, never as markup; the content security policy forbids anything else.
export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
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

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", "#icon-" + name);
  svg.append(use);
  return svg;
}

export function smallButton(name, label, onclick) {
  return make("button", { type: "button", class: "small", onclick }, icon(name), make("span", { text: label }));
}

export function textButton(kind, text, onclick) {
  return make("button", { type: "button", class: kind, text, onclick });
}

export function iconButton(name, label, onclick) {
  return make("button", { type: "button", class: "tool", "aria-label": label, title: label, onclick }, icon(name));
}

export function copyButton(text) {
  const button = smallButton("copy", "Copy", () => copyText(text(), button));
  return button;
}

export function say(text) { // for screen readers
  byId("status").textContent = text;
}

export async function copyText(text, button) {
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

export const isSend = (event) =>
  event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
