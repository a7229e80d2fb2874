"use strict";
// The page does without this: it sorts tables by their heads, and says what is below the pointer.
(() => {
  const value = (row, column) => {
    const cell = row.cells[column];
    const number = cell ? Number(cell.dataset.v ?? NaN) : NaN;
    return Number.isNaN(number) ? (cell ? cell.textContent : "") : number;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    if (body.rows.length < 3) continue;
    table.classList.add("live");
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const sort = () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)) * (down ? -1 : 1));
        body.append(...rows);
      };
      head.tabIndex = 0;
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  }

  const tip = document.getElementById("tip");
  const say = (event, words) => {
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6);
    const top = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${top}px`;
  };
  const source = document.getElementById("heat");
  const heat = source ? JSON.parse(source.textContent) : null;
  for (const strip of heat ? document.querySelectorAll("svg.strip") : []) {
    const one = heat.phases[Number(strip.dataset.strip)];
    const columns = Math.ceil(one.busy.length / heat.rows);
    strip.addEventListener("mousemove", (event) => {
      const box = strip.getBoundingClientRect();
      const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
      const row = Math.min(heat.rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * heat.rows)));
      const at = column * heat.rows + row;
      const busy = at < one.busy.length ? one.busy[at] : -1;
      const rank = one.rank ? one.rank[at] : at;
      const times = one.median > 0 ? `, ${(busy / one.median).toFixed(1)} × the median` : "";
      say(event, busy < 0 ? "" : `rank ${rank}: ${one.phase} ${(busy / 1e6).toFixed(3)} s${times}`);
    });
    strip.addEventListener("mouseleave", (event) => say(event, ""));
  }
})();
