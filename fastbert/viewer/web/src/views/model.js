// All layers and heads as thumbnails; each cell is the largest weight of its rectangle.

import { allowed, block, data, heads, layerName, length } from '../data.js';
import { element, vector } from '../dom.js';
import { HIDDEN, sequential } from '../colour.js';
import { change } from '../state.js';
import { headValue, measureLabel, ordered, showValue } from '../measures.js';

export const label = 'Model';
const side = data.thumbnail;
let pictures = null;

function paint(canvas, codes, layer, head) {
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(side, side);
  const first = (cell) => Math.floor((cell * length) / side);
  const offset = (layer * heads + head) * side * side;
  for (let i = 0; i < side * side; i++) {
    const query = first(Math.floor(i / side));
    const key = first(i % side);
    const code = codes[offset + i];
    const hidden = code === 0 && !allowed(layer, query, key);
    image.data.set(hidden ? HIDDEN : sequential((code / 255) ** 2), 4 * i);
    image.data[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
}

function describe(layer, head, sort) {
  const measured = data.measures.map(({ name }) => `${measureLabel(name)} ${showValue(name, headValue(name, layer, head))}`);
  const shown = sort === 'layer' ? measured.slice(0, 2) : [`${measureLabel(sort)} ${showValue(sort, headValue(sort, layer, head))}`];
  return `${layerName(layer)}, head ${head}: ${shown.join(', ')}`;
}

// The arrow keys move between the thumbnails; only one of them is a stop of the tab key.
function move(event, grid, columns) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  const all = [...grid.querySelectorAll('button')];
  const at = all.indexOf(document.activeElement);
  const target = event.key === 'Home' ? 0 : event.key === 'End' ? all.length - 1 : at + step;
  if (at < 0 || !all[target]) return;
  event.preventDefault();
  all[at].tabIndex = -1;
  all[target].tabIndex = 0;
  all[target].focus();
}

function thumbnail(codes, { layer, head }, state, focusable) {
  const canvas = element('canvas', { width: side, height: side, 'aria-hidden': 'true' });
  paint(canvas, codes, layer, head);
  pictures.push({ canvas, layer, head });
  const chosen = state.layer === layer && state.heads.includes(head);
  const name = `${data.layers[layer].number}·${head}`;
  const value = state.sort === 'layer' ? '' : ` ${showValue(state.sort, headValue(state.sort, layer, head))}`;
  return element('button', {
    class: 'thumbnail', type: 'button', tabindex: focusable ? 0 : -1,
    'aria-label': describe(layer, head, state.sort), 'aria-pressed': String(chosen),
    onclick: () => change({ layer, heads: [head], view: 'matrix', quantity: 'attention' }),
  }, canvas, element('span', { 'aria-hidden': 'true' }, name + value));
}

export async function draw(panel, state) {
  const codes = await block('thumbnails');
  pictures = [];
  const shown = ordered(state.sort);
  const grid = element('div', {
    class: 'thumbnails', role: 'group', 'aria-label': 'Heads of all layers; the arrow keys move',
    style: `--columns:${heads}`,
    onkeydown: (event) => move(event, grid, getComputedStyle(grid).gridTemplateColumns.split(' ').length),
  });
  const current = Math.max(0, shown.findIndex(({ layer, head }) => layer === state.layer && head === state.heads[0]));
  grid.append(...shown.map((each, at) => thumbnail(codes, each, state, at === current)));
  panel.replaceChildren(grid);
  const order = state.sort === 'layer' ? 'by layer and head' : `by ${measureLabel(state.sort)}`;
  return {
    summary: `${data.layers.length} layers with ${heads} heads, sorted ${order}. Rows are queries, columns are keys.`,
    picture,
    rows: shown.slice(0, 10).map(({ layer, head }) => [layerName(layer), head, ...data.measures.map(({ name }) => showValue(name, headValue(name, layer, head)))]),
    header: ['layer', 'head', ...data.measures.map(({ name }) => measureLabel(name))],
  };
}

function picture() {
  const cell = 64;
  const place = (at) => [(at % heads) * cell + 8, Math.floor(at / heads) * (cell + 12) + 8];
  const images = pictures.flatMap(({ canvas, layer, head }, at) => {
    const [x, y] = place(at);
    return [
      vector('image', { x, y, width: cell - 6, height: cell - 6, href: canvas.toDataURL(), style: 'image-rendering:pixelated' }),
      vector('text', { x, y: y + cell + 3, 'font-size': 9 }, `${data.layers[layer].number}·${head}`),
    ];
  });
  const rows = Math.ceil(pictures.length / heads);
  return { width: heads * cell + 16, height: rows * (cell + 12) + 16, nodes: images };
}
