// The matrix of one layer: rows are queries, columns are keys. The wheel, fingers and buttons zoom.

import { select as pick } from 'd3-selection';
import { zoom, zoomIdentity } from 'd3-zoom';
import { allowed, data, format, inSentences, length, tokenName } from '../data.js';
import { element, perFrame, shortened, sized, themed, vector } from '../dom.js';
import { HIDDEN, sequential } from '../colour.js';
import { largest, mean, planesOf } from '../planes.js';

export const label = 'Matrix';
const MARGIN = 84;
let shown = null;

function bitmap(values, state, most) {
  const canvas = element('canvas', { width: length, height: length });
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(length, length);
  for (let query = 0; query < length; query++) {
    for (let key = 0; key < length; key++) {
      const at = query * length + key;
      const hidden = !allowed(state.layer, query, key);
      image.data.set(hidden ? HIDDEN : sequential(values[at] / most), 4 * at);
      image.data[4 * at + 3] = inSentences(state.pairs, query, key) ? 255 : 60;
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
}

function tell() {
  const { cell, values, state, note } = shown;
  const value = values[cell.query * length + cell.key];
  const what = allowed(state.layer, cell.query, cell.key) ? format(value) : 'hidden (padding or outside the window)';
  note.textContent = `Query ${tokenName(cell.query)}, key ${tokenName(cell.key)}: ${what}`;
}

function moveTo(query, key) {
  shown.cell = { query: Math.max(0, Math.min(length - 1, query)), key: Math.max(0, Math.min(length - 1, key)) };
  tell();
  shown.again();
}

function keys(event) {
  const { query, key } = shown.cell;
  const step = event.shiftKey ? 10 : 1;
  const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
  if (event.key === '+' || event.key === '-') scale(event.key === '+' ? 1.5 : 1 / 1.5);
  else if (moves[event.key]) moveTo(query + moves[event.key][0], key + moves[event.key][1]);
  else return;
  event.preventDefault();
}

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

export async function draw(panel, state) {
  const values = mean(await planesOf(state));
  const most = largest(values);
  const canvas = element('canvas', { tabindex: 0, role: 'img', 'aria-label': 'Matrix of queries and keys; the arrow keys move the cell, plus and minus zoom', onkeydown: keys });
  const note = element('p', { class: 'note', role: 'status' });
  const controls = element('div', { class: 'row' },
    button('+', 'Zoom in', () => scale(1.5)), button('−', 'Zoom out', () => scale(1 / 1.5)),
    button('Fit', 'Fit the whole matrix', () => shown.zooming.transform(pick(canvas), zoomIdentity)));
  panel.replaceChildren(controls, note, canvas);
  const side = Math.max(160, Math.min(panel.clientWidth - MARGIN, 720));
  const cell = { query: Math.max(0, state.token), key: 0 };
  shown = { canvas, values, state, side, note, cell, transform: zoomIdentity, picture: bitmap(values, state, most) };
  shown.again = perFrame(paint);
  shown.zooming = zoom().scaleExtent([1, Math.max(1, length / 6)]).extent([[0, 0], [side, side]])
    .translateExtent([[0, 0], [side, side]])
    .on('zoom', ({ transform }) => {
      shown.transform = transform;
      shown.again();
    });
  pick(canvas).call(shown.zooming);
  canvas.addEventListener('pointermove', (event) => {
    const [query, key] = under(event);
    if (query >= 0 && query < length && key >= 0 && key < length) moveTo(query, key);
  });
  paint();
  tell();
  return {
    summary: `Rows are queries and columns are keys; the lightest colour is ${format(most)}, and grey is hidden.`,
    picture, header: ['query', 'key', 'value'], rows: top(values, state),
  };
}

function top(values, state) {
  const order = Array.from(values.keys()).filter((at) => inSentences(state.pairs, Math.floor(at / length), at % length));
  let kept = [];
  let least = 0;
  for (const at of order) {
    if (kept.length === 10 && values[at] <= least) continue;
    kept.push(at);
    kept.sort((a, b) => values[b] - values[a]);
    kept = kept.slice(0, 10);
    least = values[kept.at(-1)];
  }
  return kept.map((at) => [tokenName(Math.floor(at / length)), tokenName(at % length), format(values[at])]);
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

