// Small line charts of the last five minutes.

import { h, number, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 84;

/** A card with a title, the present values and a chart; `update(samples)` draws it anew. */
export function chart(title, lines) {
  const area = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none", role: "img" });
  const keys = h("div", { class: "keys" });
  const card = h("section", { class: "card" }, h("h2", null, title), area, keys);
  return { card, update: (samples) => draw(area, keys, title, lines, samples) };
}

function draw(area, keys, title, lines, samples) {
  const top = Math.max(0, ...samples.flatMap((sample) => lines.map((line) => sample[line.key])));
  const most = Math.max(1, top);
  const step = WIDTH / Math.max(1, samples.length - 1);
  const paths = lines.map((line, index) => {
    const points = samples.map((sample, at) => {
      const y = HEIGHT - 4 - (sample[line.key] / most) * (HEIGHT - 12);
      return `${at ? "L" : "M"}${(at * step).toFixed(1)} ${y.toFixed(1)}`;
    });
    return svg("path", { class: index ? "b" : "a", d: points.join("") });
  });
  const floor = svg("line", { x1: 0, y1: HEIGHT - 2, x2: WIDTH, y2: HEIGHT - 2 });
  area.replaceChildren(floor, ...paths);
  const last = samples[samples.length - 1];
  const said = lines.map((line) => `${line.name} ${last ? number(last[line.key]) : "–"}`);
  area.setAttribute("aria-label", `${title}: ${said.join(", ")}; at most ${number(top)}`);
  keys.replaceChildren(
    ...said.map((text, index) => h("span", { class: `key ${index ? "b" : "a"}` }, text)),
    h("span", null, `at most ${number(top)} in ${Math.max(1, Math.round(samples.length / 60))} min`),
  );
}
