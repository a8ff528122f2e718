// The matrix of one layer: rows are queries, columns are keys. The wheel, fingers and buttons zoom.

import { select as pick } from 'd3-selection';
import { zoom, zoomIdentity } from 'd3-zoom';
import { allowed, data, format, length, reason, sides, tokenName, windowNote } from '../data.js';
import { element, keys, perFrame, shortened, sized, themed, vector } from '../dom.js';
import { faint, HIDDEN, sequential } from '../colour.js';
import { largest, largestPairs, mean, planesOf } from '../planes.js';

export const label = 'Matrix';
const MARGIN = 84;
let shown = null;

function bitmap(values, state, most) {
  const canvas = element('canvas', { width: length, height: length });
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(length, length);
  const pixels = new Uint32Array(image.data.buffer);
  const pass = sides(state.pairs);
  for (let query = 0; query < length; query++) {
    for (let key = 0; key < length; key++) {
      const at = query * length + key;
      const colour = allowed(state.layer, state.quantity, query, key) ? sequential(values[at] / most) : HIDDEN;
      pixels[at] = pass.queries[query] && pass.keys[key] ? colour : faint(colour);
    }
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

function axis(pen, transform, side, vertical) {
  const step = transform.k * (side / length);
  const every = Math.ceil(11 / step);
  const offset = vertical ? transform.y : transform.x;
  const first = Math.max(0, Math.floor(-offset / step));
  const last = Math.min(length, Math.ceil((side - offset) / step));
  pen.font = '11px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  pen.textAlign = 'right';
  for (let token = first - (first % every); token < last; token += every) {
    const at = MARGIN + offset + (token + 0.5) * step;
    if (at < MARGIN || at > MARGIN + side) continue;
    pen.save();
    if (vertical) pen.translate(MARGIN - 5, at);
    else {
      pen.translate(at, MARGIN - 5);
      pen.rotate(Math.PI / 2);
    }
    pen.fillText(shortened(data.tokens[token], 11), 0, 0);
    pen.restore();
  }
}

function paint() {
  const { canvas, picture, side, transform, cell } = shown;
  const pen = sized(canvas, side + MARGIN, side + MARGIN);
  pen.save();
  pen.fillStyle = themed('--text');
  axis(pen, transform, side, true);
  axis(pen, transform, side, false);
  pen.beginPath();
  pen.rect(MARGIN, MARGIN, side, side);
  pen.clip();
  pen.imageSmoothingEnabled = false;
  pen.translate(MARGIN + transform.x, MARGIN + transform.y);
  pen.drawImage(picture, 0, 0, side * transform.k, side * transform.k);
  const step = transform.k * (side / length);
  pen.strokeStyle = '#ff3b30';
  pen.lineWidth = 2;
  pen.strokeRect(cell.key * step, cell.query * step, step, step);
  pen.restore();
}

function tell() {
  const { cell, values, state, note } = shown;
  const value = values[cell.query * length + cell.key];
  const seen = allowed(state.layer, state.quantity, cell.query, cell.key);
  const what = seen ? format(value) : reason(state.layer, cell.query, cell.key);
  note.textContent = `Query ${tokenName(cell.query)}, key ${tokenName(cell.key)}: ${what}`;
}

function moveTo(query, key) {
  shown.cell = { query: Math.max(0, Math.min(length - 1, query)), key: Math.max(0, Math.min(length - 1, key)) };
  tell();
  shown.again();
}

const by = (queries, keys) => (event) => {
  const step = event.shiftKey ? 10 : 1;
  moveTo(shown.cell.query + queries * step, shown.cell.key + keys * step);
};

const moves = keys({
  ArrowUp: by(-1, 0),
  ArrowDown: by(1, 0),
  ArrowLeft: by(0, -1),
  ArrowRight: by(0, 1),
  '+': () => scale(1.5),
  '-': () => scale(1 / 1.5),
});

function scale(factor) {
  shown.zooming.scaleBy(pick(shown.canvas), factor);
}

function under(event) {
  const { canvas, transform, side } = shown;
  const box = canvas.getBoundingClientRect();
  const step = transform.k * (side / length);
  const at = (place, start, offset) => Math.floor((place - start - MARGIN - offset) / step);
  return [at(event.clientY, box.top, transform.y), at(event.clientX, box.left, transform.x)];
}

function button(text, name, work) {
  return element('button', { type: 'button', 'aria-label': name, onclick: work }, text);
}

function build(panel) {
  const canvas = element('canvas', {
    tabindex: 0, role: 'img', 'aria-label': 'Matrix of queries and keys; the arrow keys move the cell, plus and minus zoom',
    onpointermove: (event) => {
      const [query, key] = under(event);
      if (query >= 0 && query < length && key >= 0 && key < length) moveTo(query, key);
    },
    ...moves,
  });
  const note = element('p', { class: 'note', role: 'status' });
  const controls = element('div', { class: 'row' },
    button('+', 'Zoom in', () => scale(1.5)), button('−', 'Zoom out', () => scale(1 / 1.5)),
    button('Fit', 'Fit the whole matrix', () => shown.zooming.transform(pick(canvas), zoomIdentity)));
  panel.replaceChildren(controls, note, canvas);
  const zooming = zoom().scaleExtent([1, Math.max(1, length / 6)]).on('zoom', ({ transform }) => {
    // The zoom counts from the corner of the canvas, the drawing from the corner of the matrix.
    const { k, x, y } = transform;
    shown.transform = { k, x: x + (k - 1) * MARGIN, y: y + (k - 1) * MARGIN };
    shown.again();
  });
  pick(canvas).call(zooming);
  return { canvas, note, zooming, transform: zoomIdentity, again: perFrame(paint) };
}

export const load = planesOf;

export function show(panel, state, planes) {
  shown ??= build(panel);
  // A change of the query token moves the cell, but leaves the values.
  const name = [state.quantity, state.layer, state.heads, state.pairs].join(' ');
  if (shown.name !== name) {
    const values = mean(planes);
    const most = largest(values);
    const head = planes.length > 1 ? 'mean' : planes[0].head;
    const rows = largestPairs([{ head, values }], { ...state, token: -1 }).map(([, ...row]) => row);
    Object.assign(shown, { name, values, most, rows, picture: bitmap(values, state, most) });
  }
  const side = Math.max(160, Math.min(panel.clientWidth - MARGIN, 720));
  const inside = [[MARGIN, MARGIN], [MARGIN + side, MARGIN + side]];
  shown.zooming.extent(inside).translateExtent(inside);
  const moved = shown.state?.token !== state.token;
  const cell = moved ? { query: Math.max(0, state.token), key: shown.cell?.key ?? 0 } : shown.cell;
  Object.assign(shown, { state, side, cell });
  paint();
  tell();
  return {
    summary: `Rows are queries and columns are keys; the lightest colour is ${format(shown.most)}, and grey is hidden.${windowNote(state)}`,
    picture, header: ['query', 'key', 'value'], rows: shown.rows,
  };
}

function picture() {
  const { side, picture: image, transform } = shown;
  const step = transform.k * (side / length);
  const every = Math.ceil(11 / step);
  const nodes = [
    vector('clipPath', { id: 'inside' }, vector('rect', { x: MARGIN, y: MARGIN, width: side, height: side })),
    vector('g', { 'clip-path': 'url(#inside)' }, vector('image', {
      x: MARGIN + transform.x, y: MARGIN + transform.y, width: side * transform.k, height: side * transform.k,
      href: image.toDataURL(), style: 'image-rendering:pixelated',
    })),
  ];
  for (let token = 0; token < length; token += every) {
    const x = MARGIN + transform.x + (token + 0.5) * step;
    const y = MARGIN + transform.y + (token + 0.5) * step;
    const text = shortened(data.tokens[token], 11);
    if (y >= MARGIN && y <= MARGIN + side) nodes.push(vector('text', { x: MARGIN - 5, y: y + 4, 'font-size': 11, 'text-anchor': 'end' }, text));
    if (x >= MARGIN && x <= MARGIN + side) nodes.push(vector('text', { 'font-size': 11, 'text-anchor': 'end', transform: `translate(${x + 4},${MARGIN - 5}) rotate(90)` }, text));
  }
  return { width: side + MARGIN, height: side + MARGIN, nodes };
}

