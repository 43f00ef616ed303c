// LaTeX as MathML, by Temml, which chat.html loads as a classic script.
import { make } from "../dom.js";

const { temml } = globalThis;
const LONGEST = 2000;
// `trust: false` refuses commands that link, load or name elements; the rest bounds what a formula can cost.
const OPTIONS = { trust: false, throwOnError: true, maxExpand: 200, maxSize: [20, 500] };

export function formula(source, display) {
  const holder = display
    ? make("span", { class: "formula display", tabIndex: 0, role: "group", "aria-label": "Formula" })
    : make("span", { class: "formula" });
  try {
    if (source.length > LONGEST) throw new RangeError("too long");
    const tree = temml.__renderToMathMLTree(source, { ...OPTIONS, displayMode: display });
    withoutStyleAttributes(tree);
    holder.append(tree.toNode());
  } catch { // not LaTeX, or more than is drawn
    holder.append(make("code", { text: source }));
  }
  return holder;
}

// The policy forbids style attributes, but not styles that a script sets one by one.
function withoutStyleAttributes(node) {
  const declared = node.attributes?.style;
  if (declared) {
    for (const [name, value] of declared.split(";").map((each) => each.split(":"))) {
      if (value) node.style[name.trim()] = value.trim();
    }
    delete node.attributes.style;
  }
  for (const child of node.children ?? []) withoutStyleAttributes(child);
}
