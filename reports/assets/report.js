"use strict";

// Tables sort by the column whose heading is pressed: numbers by value, words by letters.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const isNumber = heading.classList.contains("number");
      const was = heading.getAttribute("aria-sort");
      const down = was ? was === "ascending" : isNumber;
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => valueOf(row.cells[column].textContent, isNumber);
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => compare(a, b, down));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

// Suffixes as the tables write them; null where there is no figure.
function valueOf(text, isNumber) {
  if (!isNumber) return text;
  const match = text.replace(/[\s\u202f<]/g, "").match(/^([+-]?[\d.]+)([kMBT]?)/);
  if (!match) return null;
  return Number(match[1]) * { "": 1, k: 1e3, M: 1e6, B: 1e9, T: 1e12 }[match[2]];
}

// What is missing comes last in either direction.
function compare(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  return down ? -order : order;
}

// Tooltips: the titles of shapes, at once instead of after the browser's delay.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll("svg title")) {
  const shape = title.parentNode;
  shape.dataset.tip = title.textContent;
  shape.setAttribute("aria-label", title.textContent);
  title.remove();
}
document.addEventListener("pointermove", (event) => {
  const shape = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !shape;
  if (!shape) return;
  tip.textContent = shape.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - width - 8);
  const above = event.clientY + 16 + height > innerHeight;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${above ? event.clientY - height - 10 : event.clientY + 16}px`;
});
document.addEventListener("pointerleave", () => (tip.hidden = true));
