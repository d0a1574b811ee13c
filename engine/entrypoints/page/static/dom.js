// Building elements. Text is always set as text, so no answer of the server can become markup.

/**
 * An HTML element. `attributes`: `on` holds listeners by event, `style` custom properties by name;
 * true sets an attribute without value; false and null leave it out.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    } else if (name === "style") {
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    } else if (value !== null && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Show the element with that text, or hide it when there is none. */
export function say(element, text) {
  // Rewriting the same text would make screen readers read it again.
  if (text && element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}

/** A table. `columns`: {title, numeric}; `rows`: one list of texts or nodes per row. */
export function table(caption, columns, rows) {
  const cell = (tag, column, content) =>
    el(tag, { class: column.numeric ? "num" : null, scope: tag === "th" ? "col" : null }, content);
  return el("table", {},
    el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, columns.map((column) => cell("th", column, column.title)))),
    el("tbody", {}, rows.map((row) =>
      el("tr", {}, row.map((content, index) => cell("td", columns[index], content))))));
}

/** A region that scrolls by itself, with the keyboard too. */
export function scrollable(label, content, kind = "") {
  const attributes = { tabindex: "0", role: "region", "aria-label": label };
  return el("div", { class: `scroll ${kind}`, ...attributes }, content);
}

/** A large number with its name above and a remark below. */
export function figure(name, value, remark = "") {
  return el("div", { class: "figure" },
    el("span", { class: "name" }, name),
    el("span", { class: "value" }, value),
    remark ? el("span", { class: "note" }, remark) : null);
}

/**
 * A horizontal bar of parts: {name, kind, share}, shares in [0, 1]. `kind` is the class that
 * colours the part. What it says is in its label, so it must also stand beside it as text.
 */
export function bar(label, parts) {
  return el("div", { class: "bar", role: "img", "aria-label": label },
    parts.filter((part) => part.share > 0).map((part) =>
      el("span", { class: `part ${part.kind}`, style: { width: `${100 * part.share}%` } })));
}

/** A coloured square before a word. */
export function swatch(kind) {
  return el("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
}
