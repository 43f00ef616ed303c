// Short messages above the question box, one for each id.
import { byId, icon, make, textButton } from "../dom.js";

export function notify(id, text, action = null) {
  byId("notice-" + id)?.remove();
  if (!text) return;
  const notice = make("div", { class: "notice", id: "notice-" + id }, make("span", { text }));
  const leave = (then) => () => { notice.remove(); then(); };
  if (action) notice.append(textButton("small", action.label, leave(action.run)));
  const onclick = leave(() => byId("question").focus());
  notice.append(make("button", { type: "button", class: "tool", "aria-label": "Dismiss", onclick }, icon("close")));
  byId("notices").append(notice);
}
