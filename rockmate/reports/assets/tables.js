// Tables that are sorted, searched and paged; every cell is text of the plan, put in as text.

const PAGE = 15;

/**
 * columns: [{ key, title, kind: "text" | "bytes" | "ms" | "number", wide, path, cell }], the first is the row's header.
 * filter: { title, key, values } for a choice beside the search.
 */
class Table {
  constructor(host, { caption, columns, rows, filter, sort, page = PAGE }) {
    Object.assign(this, { host, columns, rows, page, filter, sorted: sort ?? null });
    Object.assign(this, { first: 0, wanted: "", chosenValue: "" });
    this.found = rows;
    this.texts = rows.map((row) => columns.map(({ key }) => row[key]).join(" ").toLowerCase());
    this.head = element("tr");
    this.body = element("tbody");
    const hidden = element("caption", { class: "hidden" }, caption);
    const table = element("table", { class: "rows" }, hidden, element("thead", {}, this.head), this.body);
    if (rows.length > 8) this.host.append(this.tools(caption));
    this.host.append(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table));
    this.drawHead();
    this.update();
  }

  tools(caption) {
    const search = element("input", { type: "search", placeholder: "search", "aria-label": `Search ${caption}` });
    search.addEventListener("input", () => { this.wanted = search.value.trim().toLowerCase(); this.update(); });
    const tools = element("div", { class: "tools" }, search);
    if (this.filter) {
      const options = ["", ...this.filter.values].map((value) => element("option", { value }, value || `all`));
      const select = element("select", { "aria-label": `${this.filter.title}, of ${caption}` }, ...options);
      select.addEventListener("change", () => { this.chosenValue = select.value; this.update(); });
      tools.append(element("label", {}, `${this.filter.title} `, select));
    }
    this.count = element("span", { "aria-live": "polite" });
    this.back = element("button", { type: "button" }, "previous");
    this.on = element("button", { type: "button" }, "next");
    this.back.addEventListener("click", () => this.turn(-this.page));
    this.on.addEventListener("click", () => this.turn(this.page));
    tools.append(element("div", { class: "pager" }, this.count, this.back, this.on));
    return tools;
  }

  turn(by) { this.first += by; this.drawBody(); }

  drawHead() {
    this.head.replaceChildren(...this.columns.map(({ key, title, kind }) => {
      const button = element("button", { type: "button" }, title);
      button.addEventListener("click", () => this.sortBy(key, kind));
      const head = element("th", { scope: "col", class: kind === "text" ? "" : "number" }, button);
      if (this.sorted && this.sorted.key === key)
        head.setAttribute("aria-sort", this.sorted.down ? "descending" : "ascending");
      return head;
    }));
  }

  sortBy(key, kind) {
    const again = this.sorted && this.sorted.key === key;
    this.sorted = { key, down: again ? !this.sorted.down : kind !== "text" };
    const place = this.columns.findIndex((column) => column.key === key);
    this.drawHead();
    this.head.children[place].firstChild.focus();
    this.update();
  }

  update() {
    const words = this.wanted.split(/\s+/).filter(Boolean);
    const isChosen = (row) => !this.chosenValue || row[this.filter.key] === this.chosenValue;
    this.found = this.rows.filter((row, k) => words.every((word) => this.texts[k].includes(word)) && isChosen(row));
    if (this.sorted) {
      const { key, down } = this.sorted, sign = down ? -1 : 1;
      const order = new Intl.Collator("en", { numeric: true });
      const compare = (a, b) => (typeof a === "number" ? a - b : order.compare(a, b));
      this.found = [...this.found].sort((a, b) => sign * compare(a[key], b[key]));
    }
    this.first = 0;
    this.drawBody();
  }

  drawBody() {
    this.first = Math.max(0, Math.min(this.first, this.found.length - 1));
    const shown = this.found.slice(this.first, this.first + this.page);
    this.body.replaceChildren(...shown.map((row) => this.drawRow(row)));
    const across = { colspan: String(this.columns.length) };
    if (!shown.length) this.body.append(element("tr", {}, element("td", across, "Nothing is found.")));
    if (!this.count) return;
    const end = this.first + shown.length;
    const all = this.found.length === this.rows.length ? "" : ` of ${this.rows.length} in all`;
    this.count.textContent = shown.length ? `${this.first + 1}–${end} of ${this.found.length}${all}` : "none";
    this.back.disabled = this.first === 0;
    this.on.disabled = end >= this.found.length;
  }

  drawRow(row) {
    const made = element("tr", row.chosen ? { class: "chosen" } : {});
    this.columns.forEach((column, k) => {
      const { key, kind, wide, path } = column, value = row[key];
      const formats = { bytes: formatBytes, ms: formatMs, text: path || wide ? breakable : String, number: String };
      const content = column.cell ? column.cell(value, row) : formats[kind](value);
      const style = kind !== "text" ? "number" : wide ? "wide" : path ? "path" : k ? "short" : "";
      const cell = k ? element("td", { class: style }) : element("th", { scope: "row", class: style });
      cell.append(content);
      made.append(cell);
    });
    return made;
  }
}
