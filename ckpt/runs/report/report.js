"use strict";
// The page does without this: it sorts tables by their heads, says what is below the pointer, the finger, or the arrow keys, and walks
// through the steps with the arrow keys.
(() => {
  const value = (row, column) => {
    const cell = row.cells[column];
    const number = cell ? Number(cell.dataset.v ?? NaN) : NaN;
    return Number.isNaN(number) ? (cell ? cell.textContent : "") : number;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const table of document.querySelectorAll("table.sortable:not(.figures)")) {
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
      head.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        sort();
      });
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
  for (const strip of document.querySelectorAll("svg.strip")) {
    const section = strip.closest("section");
    const heat = (section.heat ??= JSON.parse(section.querySelector("script").textContent));
    const one = heat.phases[Number(strip.dataset.strip)];
    const columns = Math.ceil(one.busy.length / heat.rows);
    const limit = (value, most) => Math.min(most, Math.max(0, value));
    let column = 0, row = 0;
    const show = (x, y) => {
      const at = column * heat.rows + row;
      const busy = at < one.busy.length ? one.busy[at] : -1;
      const rank = one.rank ? one.rank[at] : at;
      const times = one.median > 0 ? `, ${(busy / one.median).toFixed(1)} × the median` : "";
      say({clientX: x, clientY: y}, busy < 0 ? "" : `rank ${rank}: ${one.phase} ${(busy / 1e6).toFixed(3)} s${times}`);
    };
    const point = (event) => {
      const box = strip.getBoundingClientRect();
      column = limit(Math.floor(((event.clientX - box.left) / box.width) * columns), columns - 1);
      row = limit(Math.floor(((event.clientY - box.top) / box.height) * heat.rows), heat.rows - 1);
      show(event.clientX, event.clientY);
    };
    for (const name of ["pointermove", "pointerdown"]) strip.addEventListener(name, point);
    strip.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") say(event, ""); });
    strip.addEventListener("blur", (event) => say(event, ""));
    strip.addEventListener("keydown", (event) => {
      const [right, down] = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]}[event.key] ?? [0, 0];
      if (!right && !down) return;
      event.preventDefault();
      [column, row] = [limit(column + right, columns - 1), limit(row + down, heat.rows - 1)];
      const box = strip.getBoundingClientRect();
      show(box.left + ((column + 0.5) / columns) * box.width, box.top + ((row + 0.5) / heat.rows) * box.height);
    });
  }

  // The step that is shown is the target of a link, or the newest. Of the list of steps the Tab key stops at that one alone.
  const links = [...document.querySelectorAll("nav.steps a")];
  const newest = document.querySelector(".step.newest");
  const unknown = document.createElement("p");
  unknown.className = "about";
  unknown.setAttribute("role", "status");
  document.querySelector(".step")?.before(unknown);
  const mark = () => {
    const step = document.querySelector(".step:target, .step:has(:target)") ?? newest;
    const name = location.hash.slice(1);
    unknown.textContent = name && !document.getElementById(name) ? `This report has no #${name}: it shows the newest save.` : "";
    if (unknown.textContent) unknown.scrollIntoView({block: "center"});
    for (const link of links) {
      const chosen = link.hash === `#${step.id}`;
      link.tabIndex = chosen ? 0 : -1;
      link.ariaCurrent = chosen ? "true" : null;
      if (chosen) link.parentElement.scrollLeft = link.offsetLeft - link.parentElement.clientWidth / 2;
    }
  };
  const choose = (event, link) => {
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    location.replace(link.hash);
    link.focus({preventScroll: true});
  };
  links.forEach((link, at) => {
    link.addEventListener("click", (event) => choose(event, link));
    link.addEventListener("keydown", (event) =>
      choose(event, links[{ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: links.length - 1}[event.key]]));
  });
  if (newest) {
    for (const name of ["hashchange", "load"]) addEventListener(name, mark);
  }
  // The list of failures is no step: the way to it keeps the step that is chosen.
  for (const link of document.querySelectorAll("a[href='#failed']")) {
    link.addEventListener("click", (event) => {
      const failed = document.getElementById("failed");
      event.preventDefault();
      failed.scrollIntoView();
      failed.tabIndex = -1;
      failed.focus({preventScroll: true});
    });
  }
})();
