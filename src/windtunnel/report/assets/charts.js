// Memory over time, stacked by category, and the heat map of ranks.
(() => {
  const curves = DATA.memory;
  if (!curves.length) return;
  const canvas = document.querySelector("#memory canvas"), choice = document.querySelector("#memory select");
  const LEFT = 66, RIGHT = 14, TOP = 12, BOTTOM = 28, HEIGHT = 300;
  const columns = curves.map((curve) => Object.fromEntries(
    Object.entries(curve.columns).map(([key, text]) => [key, unpack(text, Float32Array)])));
  const paint = (key) => colour(key === "communication" ? "memory-communication" : key) || colour("temporary");
  let at = null;

  function draw() {
    const n = choice ? +choice.value : 0, curve = curves[n], column = columns[n];
    const [g, total] = prepare(canvas, HEIGHT), time = column.time, last = time.length - 1;
    // A device that is mostly empty would press the curve flat: then its capacity is only named.
    const far = curve.capacity === null || curve.capacity > 2 * curve.peak, most = far ? 1.2 * curve.peak : 1.06 * Math.max(curve.capacity, curve.peak);
    const begin = time[0], span = time[last] - begin || 1;
    const x = (i) => LEFT + ((time[i] - begin) / span) * (total - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
    const unit = 1024 ** Math.min(4, Math.max(0, Math.floor(Math.log2(most) / 10)));
    const every = step(most / unit, 6) * unit;
    for (let value = 0; value <= most; value += every) {
      g.fillStyle = colour("line");
      g.fillRect(LEFT, y(value), total - LEFT - RIGHT, 1);
      g.fillStyle = colour("soft");
      g.textAlign = "right";
      g.fillText(value ? bytes(value) : "0", LEFT - 8, y(value));
    }
    g.textAlign = "center";
    const jump = step(span, 8);
    for (let i = 0; i * jump <= span * 1.0001; i++) {
      const word = curve.axis === "seconds" ? seconds(i * jump) : Math.round(i * jump * 100) + " %";
      g.fillText(word, Math.min(LEFT + (i * jump / span) * (total - LEFT - RIGHT), total - RIGHT - 14), HEIGHT - BOTTOM + 14);
    }
    g.textAlign = "left";
    const below = new Float32Array(time.length);
    for (const key of curve.categories) {
      g.beginPath();
      for (let i = 0; i <= last; i++) g.lineTo(x(i), y(below[i]));
      for (let i = last; i >= 0; i--) g.lineTo(x(i), y(below[i] + column[key][i]));
      g.fillStyle = paint(key);
      g.globalAlpha = 0.86;
      g.fill();
      for (let i = 0; i <= last; i++) below[i] += column[key][i];
    }
    g.globalAlpha = 1;
    g.lineWidth = 1.5;
    g.strokeStyle = colour("ink");
    g.beginPath();
    for (let i = 0; i <= last; i++) {
      if (i) g.lineTo(x(i), y(column.reserved[i - 1]));
      g.lineTo(x(i), y(column.reserved[i]));
    }
    g.stroke();
    g.strokeStyle = g.fillStyle = colour("bad");
    if (far) {
      g.textAlign = "right";
      g.fillText(curve.capacity === null ? "" : `↑ device: ${bytes(curve.capacity)}`, total - RIGHT, TOP + 2);
      g.textAlign = "left";
    } else {
      g.setLineDash([6, 4]);
      g.beginPath();
      g.moveTo(LEFT, y(curve.capacity));
      g.lineTo(total - RIGHT, y(curve.capacity));
      g.stroke();
      g.setLineDash([]);
    }
    if (at !== null && at <= last) {
      g.fillStyle = colour("soft");
      g.fillRect(x(at), TOP, 1, HEIGHT - TOP - BOTTOM);
    }
  }

  canvas.addEventListener("pointermove", (event) => {
    const n = choice ? +choice.value : 0, curve = curves[n], column = columns[n], time = column.time;
    const box = canvas.getBoundingClientRect(), last = time.length - 1;
    const share = Math.min(1, Math.max(0, (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)));
    const moment = time[0] + share * (time[last] - time[0]);
    let low = 0, high = last;
    while (low < high) { const middle = (low + high) >> 1; if (time[middle] < moment) low = middle + 1; else high = middle; }
    at = low > 0 && moment - time[low - 1] < time[low] - moment ? low - 1 : low;
    const parts = [...curve.categories].reverse().map((key) => `${key}: ${bytes(column[key][at])}`);
    const when = curve.axis === "seconds" ? seconds(time[at] - time[0]) : (time[at] * 100).toFixed(1) + " % of the step";
    showTip(event, [`${curve.label}, ${when}`, `allocated: ${bytes(column.allocated[at])}`,
      `reserved: ${bytes(column.reserved[at])}`, ...parts].join("\n"));
    draw();
  });
  canvas.addEventListener("pointerleave", (event) => { at = null; showTip(event, ""); draw(); });
  if (choice) choice.addEventListener("change", draw);
  redraws.push(draw);
  draw();
})();

(() => {
  const data = DATA.heat;
  if (!data) return;
  const canvas = document.querySelector("#heat canvas"), value = unpack(data.value, Float32Array);
  const { hosts, devices, low, high } = data, GAP = 2, LABEL = 16;
  let cell = 0, columns = 1;

  function draw() {
    const room = canvas.parentElement.clientWidth;
    // The largest squares of which all hosts fit into a picture that is not taller than a screen.
    let height = Infinity;
    for (cell = 26; cell >= 4 && height > 420; cell--) {
      columns = Math.min(hosts, Math.max(1, Math.floor(room / (cell + GAP))));
      height = Math.ceil(hosts / columns) * (devices * (cell + 1) + LABEL);
    }
    cell++;
    const block = devices * (cell + 1) + LABEL, [g] = prepare(canvas, height);
    const [cold, hot] = [colour("cold"), colour("hot")];
    g.font = "10px system-ui, sans-serif";
    const sparse = Math.ceil(26 / (cell + GAP));
    for (let host = 0; host < hosts; host++) {
      const x = (host % columns) * (cell + GAP), top = Math.floor(host / columns) * block;
      g.globalAlpha = 1;
      if ((host % columns) % sparse === 0) {
        g.fillStyle = colour("soft");
        g.fillText(host, x + 1, top + 6);
      }
      for (let device = 0; device < devices; device++) {
        const one = value[host * devices + device];
        if (isNaN(one)) continue;
        const y = top + LABEL - 2 + device * (cell + 1), share = high > low ? (one - low) / (high - low) : 0;
        g.globalAlpha = 1;
        g.fillStyle = cold;
        g.fillRect(x, y, cell, cell);
        g.globalAlpha = share;
        g.fillStyle = hot;
        g.fillRect(x, y, cell, cell);
      }
    }
    g.globalAlpha = 1;
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), block = devices * (cell + 1) + LABEL;
    const x = event.clientX - box.left, y = event.clientY - box.top, column = Math.floor(x / (cell + GAP));
    const host = Math.floor(y / block) * columns + column, device = Math.floor(((y % block) - LABEL + 2) / (cell + 1));
    const one = column < columns && host < hosts && device >= 0 && device < devices ? value[host * devices + device] : NaN;
    showTip(event, isNaN(one) ? "" : `rank ${host * devices + device}: ${figure(one, data.unit)}\nhost ${host}, device ${device}`);
  });
  canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
  redraws.push(draw);
  draw();
})();
