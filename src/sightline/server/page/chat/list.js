// The list of conversations: search, and a menu to rename, export and delete each.
import { byId, iconButton, make, say } from "../dom.js";
import { store, stored } from "../local.js";
import { titleOf } from "./conversation.js";
import { asJson, asMarkdown, download } from "./exports.js";

const HIDDEN = "sightline.list"; // in localStorage: "hidden" where the reader wants the room
const wide = matchMedia("(min-width: 900px)"); // as in chat.css: below, the list covers the page

export class ConversationList {
  // `actions`: open, renamed and remove, each with a conversation.
  constructor(actions) {
    this.actions = actions;
    this.conversations = [];
    this.opened = null;
    this.renaming = null;
    byId("search").addEventListener("input", () => this.draw());
    byId("toggle-list").addEventListener("click", () => this.toggle(byId("side").hidden));
    byId("close-list").addEventListener("click", () => this.toggle(false));
    byId("backdrop").addEventListener("click", () => this.toggle(false));
    byId("side").addEventListener("keydown", (event) => { if (event.key === "Escape") this.leave(event); });
    wide.addEventListener("change", () => this.arrange());
    for (const [id, action] of Object.entries(this.menu())) byId(id).addEventListener("click", action);
    this.arrange();
  }
  show(conversations, opened) {
    this.conversations = conversations;
    this.opened = opened;
    this.draw();
  }
  draw() {
    if (this.renaming) return;
    const wanted = byId("search").value.trim().toLowerCase();
    const found = this.conversations.filter((each) => !wanted || contains(each, wanted));
    byId("conversations").replaceChildren(...found.map((each) => this.entry(each)));
    byId("nothing").hidden = found.length > 0;
    byId("nothing").textContent = wanted ? "No conversation contains this." : "Conversations will be listed here.";
  }
  entry(conversation) {
    const title = conversation.title || "Untitled";
    const open = make("button", { type: "button", class: "entry", text: title, title, onclick: () => this.open(conversation) });
    if (conversation.id === this.opened?.id) open.setAttribute("aria-current", "true");
    const more = iconButton("more", `Actions for ${title}`, () => this.openMenu(conversation, more));
    more.setAttribute("aria-haspopup", "true");
    return make("li", { "data-id": conversation.id }, open, more);
  }
  open(conversation) {
    this.actions.open(conversation);
    if (!wide.matches) this.toggle(false);
  }

  openMenu(conversation, button) {
    this.chosen = conversation;
    const menu = byId("entry-menu");
    menu.showPopover();
    const { bottom, top, right } = button.getBoundingClientRect();
    const below = bottom + menu.offsetHeight < innerHeight;
    menu.style.top = `${below ? bottom : Math.max(0, top - menu.offsetHeight)}px`;
    menu.style.left = `${Math.max(8, Math.min(right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
    menu.querySelector("button").focus();
  }
  menu() {
    const closing = (action) => () => {
      byId("entry-menu").hidePopover();
      action(this.chosen);
    };
    return {
      rename: closing((conversation) => this.rename(conversation)),
      "export-markdown": closing((conversation) => download(conversation, "md", asMarkdown(conversation))),
      "export-json": closing((conversation) => download(conversation, "json", asJson(conversation))),
      delete: closing((conversation) => {
        this.actions.remove(conversation);
        byId("search").focus();
      }),
    };
  }
  rename(conversation) {
    const item = byId("conversations").querySelector(`[data-id="${conversation.id}"]`);
    const box = make("input", { value: conversation.title, "aria-label": "New title", maxLength: 200 });
    this.renaming = box;
    const leave = (title) => {
      if (this.renaming !== box) return;
      this.renaming = null;
      if (title && title !== conversation.title) {
        Object.assign(conversation, { title, renamed: true });
        this.actions.renamed(conversation);
        say("Renamed.");
      }
      this.draw();
      byId("conversations").querySelector(`[data-id="${conversation.id}"] .entry`)?.focus();
    };
    box.addEventListener("blur", () => leave(titleOf(box.value)));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) leave(titleOf(box.value));
      if (event.key === "Escape") { event.stopPropagation(); leave(""); }
    });
    item.replaceChildren(box);
    box.focus();
    box.select();
  }

  toggle(on) {
    if (wide.matches) store("localStorage", HIDDEN, on ? null : "hidden");
    this.place(on);
    if (on) byId("search").focus();
    else byId("toggle-list").focus();
  }
  arrange() { // as the width of the page and the reader's choice have it
    this.place(wide.matches && stored("localStorage", HIDDEN) !== "hidden");
  }
  place(on) {
    const covers = on && !wide.matches;
    byId("side").hidden = !on;
    byId("backdrop").hidden = !covers;
    byId("shell").inert = covers;
    byId("toggle-list").setAttribute("aria-expanded", String(on));
  }
  leave(event) {
    if (wide.matches || byId("entry-menu").matches(":popover-open")) return;
    event.stopPropagation();
    this.toggle(false);
  }
}

function contains({ title, messages }, wanted) {
  return title.toLowerCase().includes(wanted) || messages.some(({ text }) => text.toLowerCase().includes(wanted));
}
