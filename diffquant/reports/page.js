"use strict";

// A click on a head sorts by it, another the other way; what has no number stands last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const falls = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const cells = new Map([...body.rows].map((row) => [row, row.cells[column]]));
    const isNumeric = head.className === "" || [...cells.values()].every((cell) => "value" in cell.dataset);
    const compare = (a, b) => {
      const [x, y] = [cells.get(a), cells.get(b)];
      if (!isNumeric) return x.textContent.localeCompare(y.textContent, "en", { numeric: true }) * (falls ? -1 : 1);
      const missing = !("value" in x.dataset) - !("value" in y.dataset);
      return missing || (falls ? -1 : 1) * ((+x.dataset.value || 0) - (+y.dataset.value || 0));
    };
    body.append(...[...body.rows].sort(compare));
  }));
}

// Rows that hold every word of the filter stay.
for (const input of document.querySelectorAll(".filter input")) {
  const rows = [...input.closest(".sheet").querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const shown = rows.filter((row) => !row.hidden).length;
    input.parentElement.querySelector("output").textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : "";
  });
}

// The value of a drawing's point beside the pointer, and where the keyboard or a finger chose it.
const tooltip = document.createElement("div");
tooltip.id = "tooltip";
tooltip.hidden = true;
document.body.append(tooltip);

const show = (tip) => {
  tooltip.hidden = !tip;
  if (!tip) return;
  tooltip.textContent = tip.getAttribute("aria-label");
  const [point, size] = [tip.getBoundingClientRect(), tooltip.getBoundingClientRect()];
  const left = point.left + point.width / 2 - size.width / 2;
  tooltip.style.left = `${Math.max(4, Math.min(left, document.documentElement.clientWidth - size.width - 4))}px`;
  tooltip.style.top = `${point.top > size.height + 8 ? point.top - size.height - 4 : point.bottom + 4}px`;
};
for (const tip of document.querySelectorAll(".tip")) {
  const title = tip.querySelector("title");
  tip.setAttribute("aria-label", title.textContent);
  tip.setAttribute("role", "img");
  title.remove();
}
for (const kind of ["pointerover", "pointerdown", "focusin"]) {
  document.addEventListener(kind, (event) => show(event.target.closest(".tip")));
}
// Choosing a point by the keyboard may scroll to it.
addEventListener("scroll", () => show(document.activeElement?.closest(".tip")), { passive: true, capture: true });
