// All layers and heads as thumbnails; each cell is the largest weight of its rectangle.

import { allowed, data, heads, layerName, length } from '../data.js';
import { element, keys, vector } from '../dom.js';
import { HIDDEN, sequential } from '../colour.js';
import { thumbnails } from '../planes.js';
import { change } from '../state.js';
import { headValue, measureLabel, ordered, showValue } from '../measures.js';

export const label = 'Model';
const side = data.thumbnail;
let grid = null;
// The thumbnails by layer and head, which are painted once.
const cells = new Map();

const first = Array.from({ length: side }, (_, cell) => Math.floor((cell * length) / side));
const shades = Uint32Array.from({ length: 256 }, (_, code) => sequential((code / 255) ** 2));

function paint(codes, layer, head) {
  const canvas = element('canvas', { width: side, height: side, 'aria-hidden': 'true' });
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(side, side);
  const pixels = new Uint32Array(image.data.buffer);
  const offset = (layer * heads + head) * side * side;
  for (let i = 0; i < side * side; i++) {
    const code = codes[offset + i];
    const hidden = code === 0 && !allowed(layer, 'attention', first[Math.floor(i / side)], first[i % side]);
    pixels[i] = hidden ? HIDDEN : shades[code];
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

function describe(layer, head, sort) {
  const measured = data.measures.map(({ name }) => `${measureLabel(name)} ${showValue(name, headValue(name, layer, head))}`);
  const shown = sort === 'layer' ? measured.slice(0, 2) : [`${measureLabel(sort)} ${showValue(sort, headValue(sort, layer, head))}`];
  const { window } = data.layers[layer];
  const limit = window === null ? '' : `, at most ${window} tokens away`;
  return `${layerName(layer)}, head ${head}: ${shown.join(', ')}${limit}`;
}

// The keys move between the thumbnails; only one of them is a stop of the tab key.
function move(target) {
  const all = [...grid.children];
  const at = all.indexOf(document.activeElement);
  const next = all[target(at, all.length, getComputedStyle(grid).gridTemplateColumns.split(' ').length)];
  if (at < 0 || !next) return;
  all[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

const moves = keys({
  ArrowRight: () => move((at) => at + 1),
  ArrowLeft: () => move((at) => at - 1),
  ArrowDown: () => move((at, _, columns) => at + columns),
  ArrowUp: () => move((at, _, columns) => at - columns),
  Home: () => move(() => 0),
  End: () => move((_, count) => count - 1),
});

function build(panel, codes) {
  grid = element('div', { class: 'thumbnails', role: 'group', 'aria-label': 'Heads of all layers; the arrow keys move', style: `--columns:${heads}`, ...moves });
  for (const { layer, head } of ordered('layer')) {
    const canvas = paint(codes, layer, head);
    const name = element('span', { 'aria-hidden': 'true' });
    const button = element('button', {
      class: 'thumbnail', type: 'button', onclick: () => change({ layer, heads: [head], view: 'matrix', quantity: 'attention' }),
    }, canvas, name);
    cells.set(`${layer}·${head}`, { button, canvas, name });
  }
  panel.replaceChildren(grid);
}

export const load = thumbnails;

export function show(panel, state, codes) {
  if (grid === null) build(panel, codes);
  const shown = ordered(state.sort);
  const current = Math.max(0, shown.findIndex(({ layer, head }) => layer === state.layer && head === state.heads[0]));
  shown.forEach(({ layer, head }, at) => {
    const { button, name } = cells.get(`${layer}·${head}`);
    const value = state.sort === 'layer' ? '' : ` ${showValue(state.sort, headValue(state.sort, layer, head))}`;
    name.textContent = `${data.layers[layer].number}·${head}${value}`;
    button.tabIndex = at === current ? 0 : -1;
    button.setAttribute('aria-label', describe(layer, head, state.sort));
    button.setAttribute('aria-pressed', String(state.layer === layer && state.heads.includes(head)));
    if (grid.children[at] !== button) grid.insertBefore(button, grid.children[at] ?? null);
  });
  const order = state.sort === 'layer' ? 'by layer and head' : `by ${measureLabel(state.sort)}`;
  return {
    summary: `${data.layers.length} layers with ${heads} heads, sorted ${order}. Rows are queries, columns are keys, and grey is hidden.`,
    picture: () => picture(shown),
    rows: shown.slice(0, 10).map(({ layer, head }) => [layerName(layer), head, ...data.measures.map(({ name }) => showValue(name, headValue(name, layer, head)))]),
    header: ['layer', 'head', ...data.measures.map(({ name }) => measureLabel(name))],
  };
}

function picture(shown) {
  const cell = 64;
  const images = shown.flatMap(({ layer, head }, at) => {
    const [x, y] = [(at % heads) * cell + 8, Math.floor(at / heads) * (cell + 12) + 8];
    const { canvas } = cells.get(`${layer}·${head}`);
    return [
      vector('image', { x, y, width: cell - 6, height: cell - 6, href: canvas.toDataURL(), style: 'image-rendering:pixelated' }),
      vector('text', { x, y: y + cell + 3, 'font-size': 9 }, `${data.layers[layer].number}·${head}`),
    ];
  });
  const rows = Math.ceil(shown.length / heads);
  return { width: heads * cell + 16, height: rows * (cell + 12) + 16, nodes: images };
}
