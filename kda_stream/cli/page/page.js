"use strict";

// Each head of a table becomes a button that sorts by its column.

function key(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
}

function compare(one, other) {
  if (typeof one === "number" && typeof other === "number") return one - other;
  return String(one).localeCompare(String(other), "en", { numeric: true });
}

function sort(table, heads, column) {
  const head = heads[column];
  const first = head.classList.contains("number") ? "descending" : "ascending";
  const turned = { ascending: "descending", descending: "ascending" };
  const order = turned[head.getAttribute("aria-sort")] || first;
  const sign = order === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [key(row, column), row]);
  rows.sort((one, other) => sign * compare(one[0], other[0]));
  body.append(...rows.map(([, row]) => row));
  for (const each of heads) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, heads, column));
    head.append(button);
  });
}
