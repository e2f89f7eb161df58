// Elements made by hand: text only ever becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: attributes, `class`, `on` (events), `style` (properties). */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for drawings. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (name === "style") {
      for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : printable(String(child)));
  }
  return node;
}

/** Control characters as pictures, so that escape codes are seen and do nothing. */
export function printable(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (c) => {
      const code = c.charCodeAt(0);
      if (code === 0x0d) return "";
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      return code === 0x7f ? "\u2421" : `\\u${code.toString(16).padStart(4, "0")}`;
    });
}

/** Replaces what is in `parent`, but only where it differs, so that focus and scroll stay. */
export function put(parent, ...children) {
  parent.replaceChildren(...children.flat(3).filter((child) => child));
}

/** Rows by key: those that are equal to before stay the very same elements. */
export class Rows {
  constructor(parent, key, same, make) {
    Object.assign(this, { parent, key, same, make, known: new Map() });
  }

  show(items) {
    const next = new Map();
    let at = this.parent.firstChild;
    for (const item of items) {
      const key = this.key(item);
      const before = this.known.get(key);
      let node = before?.node;
      if (!before || !this.same(before.item, item)) {
        node = this.make(item, before?.node);
        if (before && before.node !== node) {
          if (at === before.node) at = node;
          before.node.replaceWith(node);
        }
      }
      next.set(key, { item, node });
      if (at === node) at = at.nextSibling;
      else this.parent.insertBefore(node, at);
      this.known.delete(key);
    }
    for (const { node } of this.known.values()) node.remove();
    this.known = next;
  }
}

/** A bar of coloured parts, `[[class, amount, what it says when pointed at], ...]`. */
export function stackedBar(parts, label, props) {
  const bar = h("div", { class: "stack", role: "img", "aria-label": label, ...props });
  const all = parts.reduce((sum, [, amount]) => sum + amount, 0);
  for (const [name, amount, text] of parts) {
    // As percentages: growth factors that add up to less than 1 would not fill the bar.
    const style = { "flex-grow": String((100 * amount) / all), "flex-basis": "0" };
    bar.append(explain(h("div", { class: `seg ${name}`, style }), text));
  }
  return bar;
}

export function seconds(value) {
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${Math.round(value * 1000)} ms`;
}

export function bytes(value) {
  let left = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (left < 1000) return `${unit === "B" || left >= 100 ? Math.round(left) : left.toPrecision(3)} ${unit}`;
    left /= 1000;
  }
  return `${left.toPrecision(3)} TB`;
}

export function number(value) {
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

/** `12:03:04`, with the date when it is another day. */
export function clock(at_s) {
  const at = new Date(at_s * 1000);
  const time = at.toLocaleTimeString([], { hour12: false });
  const same = at.toDateString() === new Date().toDateString();
  return same ? time : `${at.toLocaleDateString()} ${time}`;
}

const tip = () => document.getElementById("tip");

/** Shows `text` beside `node` while it is pointed at. */
export function explain(node, text) {
  node.addEventListener("pointerenter", () => {
    const box = tip();
    box.textContent = printable(text());
    box.hidden = false;
    const place = node.getBoundingClientRect();
    const left = Math.min(place.left, innerWidth - box.offsetWidth - 8);
    const below = place.bottom + box.offsetHeight + 12 < innerHeight;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${below ? place.bottom + 6 : place.top - box.offsetHeight - 6}px`;
  });
  node.addEventListener("pointerleave", () => { tip().hidden = true; });
  return node;
}
