// What has happened, the newest first.

import { h } from "./dom.js";
import { model } from "./model.js";
import * as f from "./format.js";
import { badge, empty, regionName } from "./parts.js";

const KINDS = {
  leader: "election",
  epoch: "epoch",
  fallback: "fallback",
  policies: "policies",
  region: "member",
  store: "store",
  peer: "reachability",
  ready: "readiness",
  reset: "reset",
  books: "books",
};
let kind = "";
let redraw = () => {};

export function eventsView(again) {
  redraw = again;
  const all = [...model.events].reverse();
  const kinds = [...new Set(all.map((event) => event.kind))].sort();
  const shown = all.filter((event) => !kind || event.kind === kind);
  return [
    h(
      "div",
      { class: "section-head title" },
      h("h1", {}, "Events"),
      h("span", { class: "muted" }, `as noticed in ${model.state.region}`),
      h(
        "label",
        { class: "inline" },
        "Kind ",
        h(
          "select",
          {
            onchange: (event) => {
              kind = event.target.value;
              redraw();
            },
          },
          h("option", { value: "", key: "all" }, "all"),
          kinds.map((k) => h("option", { value: k, key: k, selected: k === kind }, KINDS[k] ?? k)),
        ),
      ),
    ),
    shown.length ? eventList(shown) : empty("Nothing has happened yet."),
  ];
}

export function eventList(events) {
  return h(
    "ol",
    { class: "events", "aria-label": "Events, the newest first" },
    events.map((event) => {
      const level = { warn: "warn", error: "bad" }[event.level] ?? "plain";
      return h(
        "li",
        { key: `${event.at_ms}-${event.id}`, class: level },
        h("time", { datetime: new Date(event.at_ms).toISOString(), title: new Date(event.at_ms).toString() }, f.clock(event.at_ms)),
        badge(level, KINDS[event.kind] ?? event.kind),
        event.region && model.state.regions?.[event.region] ? regionName(event.region) : h("span", {}),
        h("span", { class: "text" }, event.text),
      );
    }),
  );
}
