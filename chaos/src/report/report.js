"use strict";
(() => {
  const plots = [...document.querySelectorAll(".plot, .bars")];
  const charts = new Map();
  for (const values of document.querySelectorAll("script.values")) {
    charts.set(values.parentElement.querySelector(".plot"), JSON.parse(values.textContent));
  }
  const end = charts.size ? charts.values().next().value.end : 0;
  const figure = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const cursors = plots.map((plot) => {
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    cursor.hidden = true;
    plot.append(cursor);
    return cursor;
  });

  const row = (className, name, value) => {
    const tr = document.createElement("tr");
    const key = document.createElement("i");
    key.className = "key " + className;
    const label = document.createElement("td");
    label.append(key, name);
    const number = document.createElement("td");
    number.textContent = value;
    tr.append(label, number);
    return tr;
  };
  const show = (plot, event) => {
    const box = plot.getBoundingClientRect();
    const part = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    cursors.forEach((cursor) => {
      cursor.hidden = false;
      cursor.style.left = part * 100 + "%";
    });
    const chart = charts.get(plot);
    const title = document.createElement("b");
    title.textContent = figure.format(part * end) + " s";
    tip.replaceChildren(title);
    if (chart) {
      const step = Math.floor((part * chart.end) / chart.step);
      const table = document.createElement("table");
      for (const [name, className, values] of chart.rows) {
        const value = values[Math.min(step, values.length - 1)];
        if (value || !className.startsWith("no-")) {
          table.append(row(className, name, figure.format(value)));
        }
      }
      title.append(" · " + chart.unit);
      tip.append(table);
    }
    tip.hidden = false;
    const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = Math.max(4, right ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4)) + "px";
  };
  const hide = () => {
    tip.hidden = true;
    cursors.forEach((cursor) => (cursor.hidden = true));
  };
  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => show(plot, event));
    plot.addEventListener("pointerleave", hide);
  }

  const copy = document.getElementById("copy");
  copy?.addEventListener("click", async () => {
    const code = document.getElementById("replay");
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const download = document.getElementById("download");
  if (download) {
    download.hidden = false;
    download.download = document.title.replace(/[^\w-]+/g, "-") + ".json";
    download.href = "#";
    download.addEventListener("click", () => {
      const json = document.getElementById("history").textContent;
      download.href = URL.createObjectURL(new Blob([json], { type: "application/json" }));
    });
  }
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
})();
