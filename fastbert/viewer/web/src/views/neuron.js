// For one query: its vector, every key, their product element by element, the sum and the softmax.

import { allowed, data, format, layerName, length, sides, tokenName, windowNote } from '../data.js';
import { element, keys, perFrame, shortened, sized, themed, vector } from '../dom.js';
import { diverging, headColour } from '../colour.js';
import { neurons, plane } from '../planes.js';
import { change, tokenKeys } from '../state.js';

export const label = 'Neuron';
const ROW = 20;
const TOP = 46;
const size = data.headSize;
let drawn = null;

function absolute(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) most = Math.max(most, Math.abs(values[i]));
  return most || 1;
}

// Returns a picture of vectors: one row of pixels for each vector.
function bitmap(values, scale) {
  const rows = values.length / size;
  const canvas = element('canvas', { width: size, height: rows });
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(size, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < values.length; i++) pixels[i] = diverging(values[i] / scale);
  pen.putImageData(image, 0, 0);
  return canvas;
}

function columns(total) {
  const narrow = total < 640;
  const names = narrow ? 72 : 120;
  const numbers = narrow ? 44 : 64;
  const rest = total - names - numbers - (narrow ? 60 : 110) - 24;
  return { names, vector: rest / 2, numbers, first: names, second: names + rest / 2 + 8, sums: total - numbers - (narrow ? 60 : 110), bars: total - (narrow ? 56 : 104), bar: narrow ? 50 : 96, characters: narrow ? 9 : 15 };
}

function strip(pen, picture, row, x, y, width) {
  pen.drawImage(picture, 0, row, size, 1, x, y, width, ROW - 4);
}

function paintTop(pen, place) {
  pen.fillStyle = themed('--text');
  pen.font = '12px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  const titles = [[4, 'key token'], [place.first, 'key'], [place.second, 'query × key'], [place.sums, 'q·k/√d'], [place.bars, 'softmax']];
  for (const [x, text] of titles) pen.fillText(text, x, 34);
  pen.fillText(shortened(`query ${data.tokens[drawn.query]}`, place.characters), 4, 12);
  strip(pen, drawn.queryPicture, drawn.query, place.first, 4, place.vector);
}

function paintRow(pen, place, key, y) {
  const { weights, sums, state } = drawn;
  const seen = allowed(state.layer, 'attention', drawn.query, key) && drawn.pass.queries[drawn.query] && drawn.pass.keys[key];
  pen.globalAlpha = seen ? 1 : 0.3;
  pen.fillStyle = themed('--text');
  pen.fillText(shortened(data.tokens[key], place.characters), 4, y + ROW / 2);
  strip(pen, drawn.keyPicture, key, place.first, y + 2, place.vector);
  strip(pen, drawn.productPicture, key, place.second, y + 2, place.vector);
  pen.fillText(sums[key].toFixed(1), place.sums, y + ROW / 2);
  pen.fillStyle = headColour(drawn.head);
  pen.fillRect(place.bars, y + 4, Math.max(weights[key] > 0 ? 1 : 0, (weights[key] / drawn.most) * place.bar), ROW - 8);
  pen.globalAlpha = 1;
}

// Draws the rows that are in view.
function paint() {
  const { canvas, box } = drawn;
  const [width, height] = [box.clientWidth, box.clientHeight];
  const pen = sized(canvas, width, height);
  pen.imageSmoothingEnabled = false;
  const place = columns(width);
  paintTop(pen, place);
  pen.save();
  pen.beginPath();
  pen.rect(0, TOP, width, height);
  pen.clip();
  const first = Math.floor(box.scrollTop / ROW);
  for (let key = first; key < Math.min(length, first + Math.ceil(height / ROW) + 1); key++) {
    paintRow(pen, place, key, TOP + key * ROW - box.scrollTop);
  }
  pen.restore();
}

// The pictures of queries and keys depend on the head, those of the products on the query, too.
function compute(found, weights, state) {
  const query = Math.max(0, state.token);
  const products = new Float32Array(length * size);
  const sums = new Float32Array(length);
  for (let key = 0; key < length; key++) {
    for (let i = 0; i < size; i++) {
      const product = found.queries[query * size + i] * found.keys[key * size + i];
      products[key * size + i] = product;
      sums[key] += product / Math.sqrt(size);
    }
  }
  const row = weights.subarray(query * length, (query + 1) * length);
  if (drawn.found !== found) {
    const scale = Math.max(absolute(found.queries), absolute(found.keys));
    Object.assign(drawn, { found, queryPicture: bitmap(found.queries, scale), keyPicture: bitmap(found.keys, scale) });
  }
  Object.assign(drawn, {
    sums, query, state, head: state.heads[0], weights: row, most: absolute(row), pass: sides(state.pairs),
    productPicture: bitmap(products, absolute(products)),
  });
}

function build() {
  const canvas = element('canvas', { class: 'sticky', role: 'img', 'aria-label': 'Query, keys, their products and the softmax' });
  const spacer = element('div', { style: `height:${TOP + length * ROW}px`, class: 'spacer' }, canvas);
  const box = element('div', {
    class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Queries and keys; left and right choose the query token',
    onscroll: perFrame(paint), ...keys(tokenKeys),
  }, spacer);
  return { canvas, box };
}

const having = data.layers.map((_, layer) => layer).filter((layer) => data.layers[layer].neurons);

// Says which layers have queries and keys and why, and offers them.
function missing() {
  const names = having.map((layer) => element('button', { type: 'button', class: 'offer', onclick: () => change({ layer }) }, `Show ${layerName(layer)}`));
  const words = `At ${length} tokens, this file has the queries and keys of ${having.length} of ${data.layers.length} layers only, because those of all layers would make it larger than ${data.limit}. Fewer layers, chosen with --layers or layers=, all have them.`;
  return [element('p', { class: 'note' }, words), element('div', { class: 'row', role: 'group', 'aria-label': 'Layers with queries and keys' }, names)];
}

export async function load(state) {
  const [found, weights] = await Promise.all([neurons(state.layer, state.heads[0]), plane('attention', state.layer, state.heads[0])]);
  return { found, weights };
}

export function show(panel, state, { found, weights }) {
  if (found === null) {
    panel.replaceChildren(...missing());
    return { summary: `This file has no queries and keys of ${layerName(state.layer)}.`, picture: null, header: [], rows: [] };
  }
  drawn ??= build();
  if (panel.firstChild !== drawn.box) panel.replaceChildren(drawn.box);
  compute(found, weights, state);
  paint();
  const order = Array.from(drawn.weights.keys()).sort((a, b) => drawn.weights[b] - drawn.weights[a]);
  const bias = data.biased ? ' This model adds a bias by distance before the softmax.' : '';
  return {
    summary: `Head ${drawn.head}, query ${tokenName(drawn.query)}: it attends to ${tokenName(order[0])} most (${format(drawn.weights[order[0]])}). Purple is positive, orange is negative, and the bars are relative to the largest softmax.${bias}${windowNote({ ...state, quantity: 'attention' })}`,
    picture, header: ['key', 'q·k/√d', 'softmax'],
    rows: order.slice(0, 10).map((key) => [tokenName(key), drawn.sums[key].toFixed(2), format(drawn.weights[key])]),
  };
}

function picture() {
  const { canvas, box } = drawn;
  const [width, height] = [box.clientWidth, box.clientHeight];
  return { width, height, nodes: [vector('image', { width, height, href: canvas.toDataURL() })] };
}
