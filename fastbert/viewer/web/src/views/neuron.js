// For one query: its vector, every key, their product element by element, the sum and the softmax.

import { allowed, data, format, inSentences, layerName, length, tokenName } from '../data.js';
import { element, perFrame, shortened, sized, themed, vector } from '../dom.js';
import { css, diverging, headColour } from '../colour.js';
import { neurons, plane } from '../planes.js';

export const label = 'Neuron';
const ROW = 20;
const TOP = 46;
let drawn = null;

function strip(pen, values, offset, scale, place) {
  const { x, y, width } = place;
  const size = data.headSize;
  for (let i = 0; i < size; i++) {
    pen.fillStyle = css(diverging(Math.max(-1, Math.min(1, values[offset + i] / scale))));
    const left = x + Math.round((i * width) / size);
    pen.fillRect(left, y + 2, x + Math.round(((i + 1) * width) / size) - left, ROW - 4);
  }
}

const absolute = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;

function columns(total) {
  const narrow = total < 640;
  const names = narrow ? 72 : 120;
  const numbers = narrow ? 44 : 64;
  const rest = total - names - numbers - (narrow ? 60 : 110) - 24;
  return { names, vector: rest / 2, numbers, first: names, second: names + rest / 2 + 8, sums: total - numbers - (narrow ? 60 : 110), bars: total - (narrow ? 56 : 104), bar: narrow ? 50 : 96, characters: narrow ? 9 : 15 };
}

function paintTop(pen, place) {
  pen.fillStyle = themed('--text');
  pen.font = '12px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  const titles = [[4, 'key token'], [place.first, 'key'], [place.second, 'query × key'], [place.sums, 'q·k/√d'], [place.bars, 'softmax']];
  for (const [x, text] of titles) pen.fillText(text, x, 34);
  pen.fillText(shortened(`query ${data.tokens[drawn.query]}`, place.characters), 4, 12);
  strip(pen, drawn.queries, drawn.query * data.headSize, drawn.scale, { x: place.first, y: 2, width: place.vector });
}

function paintRow(pen, place, key, y) {
  const { queries, keys, query, weights, sums, products, state } = drawn;
  const size = data.headSize;
  const product = new Float32Array(size);
  for (let i = 0; i < size; i++) product[i] = queries[query * size + i] * keys[key * size + i];
  const seen = allowed(state.layer, query, key) && inSentences(state.pairs, query, key);
  pen.globalAlpha = seen ? 1 : 0.3;
  pen.fillStyle = themed('--text');
  pen.fillText(shortened(data.tokens[key], place.characters), 4, y + ROW / 2);
  strip(pen, keys, key * size, drawn.scale, { x: place.first, y, width: place.vector });
  strip(pen, product, 0, products, { x: place.second, y, width: place.vector });
  pen.fillStyle = themed('--text');
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

function compute(found, weights, state, query) {
  const size = data.headSize;
  const sums = new Float32Array(length);
  let products = 0;
  for (let key = 0; key < length; key++) {
    for (let i = 0; i < size; i++) {
      const product = found.queries[query * size + i] * found.keys[key * size + i];
      sums[key] += product;
      products = Math.max(products, Math.abs(product));
    }
    sums[key] /= Math.sqrt(size);
  }
  const scale = Math.max(absolute(found.queries), absolute(found.keys));
  const row = weights.subarray(query * length, (query + 1) * length);
  return { ...found, sums, products: products || 1, scale, query, state, head: state.heads[0], weights: row, most: absolute(row) };
}

export async function draw(panel, state) {
  const found = await neurons(state.layer, state.heads[0]);
  if (found === null) {
    drawn = null;
    const has = data.layers.map((_, layer) => layer).filter((layer) => data.layers[layer].neurons).map(layerName);
    panel.replaceChildren(element('p', { class: 'note' }, `At ${length} tokens, this file has queries and keys of these layers only: ${has.join(', ')}.`));
    return { summary: 'No queries and keys of this layer.', picture: null, header: [], rows: [] };
  }
  const query = Math.max(0, state.token);
  drawn = compute(found, await plane('attention', state.layer, state.heads[0]), state, query);
  const canvas = element('canvas', { class: 'sticky', role: 'img', 'aria-label': 'Query, keys, their products and the softmax' });
  const spacer = element('div', { style: `height:${TOP + length * ROW}px`, class: 'spacer' }, canvas);
  const box = element('div', { class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Queries and keys' }, spacer);
  panel.replaceChildren(box);
  Object.assign(drawn, { canvas, box });
  paint();
  box.addEventListener('scroll', perFrame(paint), { passive: true });
  const order = Array.from(drawn.weights.keys()).sort((a, b) => drawn.weights[b] - drawn.weights[a]);
  const bias = data.biased ? ' This model adds a bias by distance before the softmax.' : '';
  return {
    summary: `Head ${drawn.head}, query ${tokenName(query)}: it attends to ${tokenName(order[0])} most (${format(drawn.weights[order[0]])}). Purple is positive, orange is negative, and the bars are relative to the largest softmax.${bias}`,
    picture, header: ['key', 'q·k/√d', 'softmax'],
    rows: order.slice(0, 10).map((key) => [tokenName(key), drawn.sums[key].toFixed(2), format(drawn.weights[key])]),
  };
}

function picture() {
  const { canvas, box } = drawn;
  const [width, height] = [box.clientWidth, box.clientHeight];
  return { width, height, nodes: [vector('image', { width, height, href: canvas.toDataURL() })] };
}
