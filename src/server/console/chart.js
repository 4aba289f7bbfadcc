// Rates over the last minutes: regions stacked on each other, the limit as a line.

import { h, s } from "./dom.js";
import { model } from "./model.js";
import { colour, regionNames, shape } from "./parts.js";
import * as f from "./format.js";

const SPAN_MS = 300_000;

/** Frames of a policy: `[{ t, values: { region: [admitted, denied] or null } }]`. */
function series(policy) {
  const now = model.state?.now_ms ?? Date.now();
  const from = now - SPAN_MS;
  return { from, now, points: model.frames.filter((frame) => frame.t >= from).map((frame) => ({ t: frame.t, values: frame.policies[policy] ?? {} })) };
}

function value(point, region, field) {
  const pair = point.values[region];
  return pair === null ? null : (pair?.[field] ?? 0);
}

/** The path of one region's layer: between what is below it and that with it. Gaps (nothing heard) break it. */
function layer(points, bottoms, tops, x, y) {
  let path = "";
  let run = [];
  const at = (i, v) => `${x(points[i].t).toFixed(1)},${y(v).toFixed(1)}`;
  const flush = () => {
    if (run.length > 1) {
      const up = run.map((i) => at(i, tops[i]));
      const down = [...run].reverse().map((i) => at(i, bottoms[i]));
      path += `M${[...up, ...down].join("L")}Z`;
    }
    run = [];
  };
  points.forEach((_, i) => (tops[i] === null ? flush() : run.push(i)));
  flush();
  return path;
}

function line(points, values, x, y) {
  let path = "";
  let down = false;
  points.forEach((point, i) => {
    if (values[i] === null) {
      down = false;
      return;
    }
    path += `${down ? "L" : "M"}${x(point.t).toFixed(1)},${y(values[i]).toFixed(1)}`;
    down = true;
  });
  return path;
}

function stack(points, regions, field) {
  const floor = points.map(() => 0);
  return regions.map((region) => {
    const bottoms = [...floor];
    const tops = points.map((point, i) => {
      const v = value(point, region, field);
      if (v === null) return null;
      floor[i] += v;
      return floor[i];
    });
    return { region, bottoms, tops };
  });
}

function totals(points, regions, field) {
  return points.map((point) => regions.reduce((sum, region) => sum + (value(point, region, field) ?? 0), 0));
}

function peak(...lists) {
  return Math.max(1, ...lists.flat().filter((v) => v !== undefined && v !== null && Number.isFinite(v)));
}

/** Bands in which nothing was heard of a region. */
function gaps(points, regions) {
  return points.map((point) => regions.some((region) => value(point, region, 0) === null));
}

function gapBands(points, regions, x, height) {
  const flags = gaps(points, regions);
  const bands = [];
  points.forEach((point, i) => {
    if (!flags[i]) return;
    const x0 = x(point.t);
    const x1 = points[i + 1] ? x(points[i + 1].t) : x0 + 3;
    bands.push(s("rect", { class: "gap", x: x0.toFixed(1), y: 0, width: Math.max(1, x1 - x0).toFixed(1), height }));
  });
  return bands;
}

/** Small, without axes. */
/** What a chart goes up to. A limit far above all that passes does not press it flat: it is drawn at the upper edge. */
function ceiling(limit, ...lists) {
  const most = peak(...lists);
  return limit > most * 4 ? { top: most * 4, beyond: true } : { top: peak([most], [limit]), beyond: false };
}

export function sparkline(policy, limit) {
  const width = 320;
  const height = 56;
  const regions = regionNames();
  const { from, now, points } = series(policy);
  const admitted = stack(points, regions, 0);
  const denied = totals(points, regions, 1);
  const top = ceiling(limit, totals(points, regions, 0), denied).top * 1.08;
  const x = (t) => ((t - from) / (now - from)) * width;
  const y = (v) => height - (v / top) * height;
  const last = points.length - 1;
  const sum = last >= 0 ? totals([points[last]], regions, 0)[0] : 0;
  const label = `The last five minutes: ${f.rate(sum)} admitted and ${f.rate(denied[last] ?? 0)} denied now${limit ? `, limit ${f.rate(limit)}` : ""}`;
  return s(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    gapBands(points, regions, x, height),
    admitted.map(({ region, bottoms, tops }) => s("path", { class: "area", key: region, d: layer(points, bottoms, tops, x, y), style: { fill: colour(region) } })),
    limit && s("path", { class: "limit", d: `M0,${Math.max(1, y(limit)).toFixed(1)}H${width}` }),
    denied.some((v) => v > 0) && s("path", { class: "denied", d: line(points, denied, x, y) }),
  );
}

function niceTop(v) {
  const power = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= v) ?? v;
}

/** Large: admitted above, denied below, with axes, a legend and a reading under the pointer. */
export function chart(policy, limit, words) {
  const regions = regionNames();
  const { from, now, points } = series(policy);
  const last = points[points.length - 1];
  return h(
    "figure",
    { class: "chart" },
    panel("Admitted", 0, { regions, from, now, points, limit, words, height: 200 }),
    panel("Denied", 1, { regions, from, now, points, height: 90 }),
    h(
      "details",
      { class: "numbers" },
      h("summary", {}, "The newest values as a table"),
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Region"), h("th", { scope: "col", class: "n" }, "Admitted"), h("th", { scope: "col", class: "n" }, "Denied"))),
        h(
          "tbody",
          {},
          regions.map((region) => {
            const pair = last?.values[region];
            const cell = (v) => h("td", { class: "n" }, pair === null ? "not heard" : f.rate(v ?? 0));
            return h("tr", { key: region }, h("th", { scope: "row" }, region), cell(pair?.[0]), cell(pair?.[1]));
          }),
        ),
      ),
    ),
  );
}

function panel(title, field, { regions, from, now, points, limit, words, height }) {
  const width = 1000;
  const layers = stack(points, regions, field);
  const all = totals(points, regions, field);
  const { top: most, beyond } = ceiling(limit, all);
  const top = niceTop(most * 1.02);
  const x = (t) => ((t - from) / (now - from)) * width;
  const y = (v) => height - (v / top) * height;
  const ticks = [0, 0.5, 1].map((part) => part * top);
  const sum = all[all.length - 1] ?? 0;
  const summary = `${title}: ${f.rate(sum)} in all regions now${limit ? `; ${words}` : ""}`;
  return h(
    "div",
    { class: "panel", key: title },
    h(
      "div",
      { class: "panel-head" },
      h("h3", {}, title, " ", h("b", {}, f.rate(sum))),
      h(
        "ul",
        { class: "legend" },
        regions.map((region) => {
          const point = points[points.length - 1];
          const v = point ? value(point, region, field) : 0;
          return h("li", { key: region, class: v === null ? "silent" : "" }, shape(region), ` ${region} `, h("b", {}, v === null ? "not heard" : f.rate(v)));
        }),
        words && h("li", { key: "limit" }, limit && h("span", { class: "swatch limit-line", "aria-hidden": "true" }), " ", words, beyond && limit > top ? " (above the chart)" : ""),
      ),
    ),
    h(
      "div",
      { class: "plot", style: { height: `${height}px` } },
      s(
        "svg",
        {
          viewBox: `0 0 ${width} ${height}`,
          preserveAspectRatio: "none",
          role: "img",
          "aria-label": summary,
          onpointermove: (event) => read(event, { points, regions, field, from, now }),
          onpointerleave: (event) => event.currentTarget.parentElement.querySelector(".reading")?.setAttribute("hidden", ""),
        },
        gapBands(points, regions, x, height),
        ticks.slice(1).map((v) => s("path", { class: "grid", d: `M0,${y(v).toFixed(1)}H${width}` })),
        layers.map(({ region, bottoms, tops }) => s("path", { class: "area", key: region, d: layer(points, bottoms, tops, x, y), style: { fill: colour(region) } })),
        limit && s("path", { class: "limit", d: `M0,${Math.max(1, y(limit)).toFixed(1)}H${width}` }),
        s("path", { class: "ground", d: `M0,${height}H${width}` }),
      ),
      ticks.slice(1).map((v, i) => h("span", { class: "tick", key: `t${i}`, style: { top: `${(1 - v / top) * 100}%` } }, f.rate(v))),
      h("div", { class: "reading", hidden: true, key: "reading", "data-keep": "" }),
    ),
    field === 1 && h("div", { class: "times", "aria-hidden": "true" }, ["−5 min", "−4", "−3", "−2", "−1", "now"].map((t) => h("span", {}, t))),
  );
}

function read(event, { points, regions, field, from, now }) {
  const svg = event.currentTarget;
  const box = svg.getBoundingClientRect();
  const t = from + ((event.clientX - box.left) / box.width) * (now - from);
  const point = points.reduce((best, p) => (best && Math.abs(best.t - t) <= Math.abs(p.t - t) ? best : p), undefined);
  const reading = svg.parentElement.querySelector(".reading");
  if (!point || !reading) return;
  const lines = regions.map((region) => {
    const v = value(point, region, field);
    return `${region} ${v === null ? "not heard" : f.rate(v)}`;
  });
  reading.textContent = [f.clock(point.t), ...lines].join("\n");
  const part = (point.t - from) / (now - from);
  reading.style.left = `${part * 100}%`;
  reading.classList.toggle("left", part > 0.6);
  reading.removeAttribute("hidden");
}
