"use strict";
{
  const all = (css, root = document) => [...root.querySelectorAll(css)];
  const make = (tag, settings = {}) => Object.assign(document.createElement(tag), settings);

  const units = { k: 1e3, M: 1e6, G: 1e9 };
  const valueOf = (cell) => {
    const text = cell.textContent.trim().replace(/,/g, "");
    const found = text.match(/^[+-]?\d+(\.\d+)?(e[+-]?\d+)?/);
    if (!found) return text === "–" || text === "" ? null : text.toLowerCase();
    const unit = text.match(/ ([kMG])B$/);
    return parseFloat(found[0]) * (unit ? units[unit[1]] : 1);
  };
  const order = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  const sortBy = (table, column, head) => {
    const down = head.getAttribute("aria-sort") === "descending";
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [valueOf(row.cells[column]), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return down ? order(a, b) : order(b, a);
    });
    body.append(...rows.map(([, row]) => row));
    all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "ascending" : "descending");
  };
  for (const table of all("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = make("button", { type: "button", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => sortBy(table, column, head));
    });
    if (table.tBodies[0].rows.length < 9) continue;
    const bar = make("div", { className: "filter" });
    const label = make("label", { textContent: "Filter rows " });
    const input = make("input", { type: "search", autocomplete: "off" });
    const count = make("span", { className: "note" });
    count.setAttribute("role", "status");
    label.append(input);
    bar.append(label, count);
    table.parentElement.before(bar);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = [...table.tBodies[0].rows];
      rows.forEach((row) => {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      });
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
    });
  }

  for (const block of all(".block")) {
    const buttons = all(".rank .nm", block);
    const rows = all(".rank tbody tr", block);
    for (const button of buttons) {
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
        const chosen = buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.m);
        all("figure g[data-m]", block).forEach((group) => {
          group.classList.toggle("off", chosen.length > 0 && !chosen.includes(group.dataset.m));
        });
      });
    }
    const hidden = rows.slice(8).filter((row) => !row.querySelector(".f-ref"));
    if (hidden.length < 2) continue;
    hidden.forEach((row) => (row.hidden = true));
    const more = make("button", { type: "button", textContent: `${hidden.length} more` });
    more.addEventListener("click", () => {
      hidden.forEach((row) => (row.hidden = false));
      more.remove();
    });
    block.querySelector(".rank").parentElement.after(more);
  }

  const tip = make("div", { id: "tip", hidden: true });
  document.body.append(tip);
  const point = (event) => {
    const mark = event.target.closest?.("[data-tip]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  };
  document.addEventListener("pointerover", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    closed.forEach((one) => (one.open = one.classList.contains("prints")));
  });
  addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
}
