"use strict";
(() => {
  const { figures, dark: dark_of } = JSON.parse(document.getElementById("plots").textContent);
  const holders = [...document.querySelectorAll(".plot")];
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;

  // A page of a file may not store anything: then the choice lasts until it is closed.
  const kept = {
    get: (name) => { try { return localStorage.getItem(name); } catch { return null; } },
    set: (name, value) => { try { localStorage.setItem(name, value); } catch { /* see above */ } },
  };

  // --- light and dark
  const button = document.getElementById("theme");
  let chosen = kept.get("trp_scale theme");
  const dark = () => (chosen ? chosen === "dark" : system.matches);
  const coloured = (value) => (dark() && dark_of[value]) || value;
  const styled = (index) => {
    const figure = structuredClone(figures[index]);
    const style = getComputedStyle(document.querySelector("figure"));
    const soft = getComputedStyle(document.querySelector(".look")).color;
    for (const trace of figure.data) {
      trace.line.color = coloured(trace.line.color);
      if (trace.marker) trace.marker.color = coloured(trace.marker.color);
      if (trace.fillcolor) trace.fillcolor = coloured(trace.fillcolor);
      if (hidden[index].has(trace.legendgroup)) trace.visible = false;
    }
    for (const shape of figure.layout.shapes || []) shape.line.color = coloured(shape.line.color);
    const rule = { gridcolor: style.borderTopColor, zerolinecolor: style.borderTopColor, linecolor: style.borderTopColor };
    Object.assign(figure.layout.xaxis, rule);
    Object.assign(figure.layout.yaxis, rule);
    Object.assign(figure.layout, {
      font: { family: style.fontFamily, size: 12, color: soft },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: style.backgroundColor, bordercolor: style.borderTopColor, font: { color: style.color } },
      dragmode: touch ? false : "zoom", // a finger scrolls the page
    });
    return figure;
  };

  const hidden = figures.map(() => new Set());
  const draw = (index) => {
    const figure = styled(index);
    return Plotly.react(holders[index], figure.data, figure.layout, { displayModeBar: false, responsive: true });
  };
  const show_theme = () => {
    root.style.colorScheme = chosen || "light dark";
    button.textContent = dark() ? "light" : "dark";
    figures.forEach((_, index) => draw(index));
  };
  button.addEventListener("click", () => {
    chosen = dark() ? "light" : "dark";
    kept.set("trp_scale theme", chosen);
    show_theme();
  });
  system.addEventListener("change", show_theme);
  addEventListener("beforeprint", () => holders.forEach((holder) => Plotly.Plots.resize(holder)));

  // --- legends: a click hides or shows a line
  for (const legend of document.querySelectorAll(".legend")) {
    legend.addEventListener("click", (event) => {
      const key = event.target.closest("button");
      if (!key) return;
      const index = Number(legend.dataset.plot);
      const lines = hidden[index];
      lines.has(key.dataset.line) ? lines.delete(key.dataset.line) : lines.add(key.dataset.line);
      key.setAttribute("aria-pressed", String(!lines.has(key.dataset.line)));
      draw(index);
    });
  }

  // --- tables: a click on a heading sorts; cells without a value come last either way
  const value_of = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.order === undefined ? cell.textContent.trim() : Number(cell.dataset.order);
  };
  const is_empty = (value) => value === "" || value === "-";
  const compared = (one, two) =>
    typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two), "en", { numeric: true });
  for (const table of document.querySelectorAll("table")) {
    table.tHead.addEventListener("click", (event) => {
      const heading = event.target.closest("th");
      if (!heading) return;
      const words = heading.classList.contains("words");
      const before = heading.getAttribute("aria-sort");
      const rises = before ? before === "descending" : words;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", rises ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [row, value_of(row, heading.cellIndex)]);
      rows.sort(([, one], [, two]) =>
        is_empty(one) - is_empty(two) || (rises ? compared(one, two) : compared(two, one)));
      body.append(...rows.map(([row]) => row));
    });
  }

  show_theme();

  // --- a page that is served looks for a newer version of itself
  const version = document.querySelector('meta[name="version"]').content;
  if (version) {
    const look = async () => {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        if (answer.ok && (await answer.text()) !== version) location.reload();
      } catch { /* trp-scale watch has ended: the page stays as it is */ }
    };
    setInterval(() => document.hidden || look(), 2000);
  }
})();
