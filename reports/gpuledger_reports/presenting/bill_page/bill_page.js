"use strict";
// Sorts, filters and copies. The page has the same content without it.
const table = document.getElementById("lines");
if (table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  // A column's amounts have the same number of decimals, so they compare exactly as whole numbers.
  const amount = (cell) => BigInt(cell.querySelector("data").value.replace(".", ""));
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const sortBy = (head) => {
    const isNumber = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const rises = before ? before === "descending" : !isNumber;
    table.tHead.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", rises ? "ascending" : "descending");
    const key = (row) => (isNumber ? amount(row.cells[head.cellIndex]) : row.cells[head.cellIndex].textContent);
    const sorted = rows.map((row) => [key(row), row]).sort((a, b) => (rises ? 1 : -1) * compare(a[0], b[0]));
    body.append(...sorted.map(([, row]) => row));
  };
  // No HTML buttons: browsers print a table's head with buttons only on the first page.
  table.tHead.querySelectorAll("th").forEach((head) => {
    const button = document.createElement("span");
    button.setAttribute("role", "button");
    button.tabIndex = 0;
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(head));
    button.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      sortBy(head);
    });
  });
  const filter = document.getElementById("filter");
  filter.hidden = false;
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    rows.forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(wanted); });
  });
  const command = document.getElementById("command");
  const pattern = command.textContent;
  const said = document.getElementById("said");
  body.addEventListener("click", (event) => {
    const button = event.target.closest("button.line");
    if (!button) return;
    command.textContent = pattern.replace(" LINE ", () => ` ${button.textContent} `);
    const tell = (text) => { said.textContent = text; };
    if (!navigator.clipboard) { tell("Copy the command above the table."); return; }
    navigator.clipboard.writeText(command.textContent).then(
      () => tell(`Copied: explain ${button.textContent}`),
      () => tell("Copy the command above the table."),
    );
  });
}
