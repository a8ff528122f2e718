// Planes: L × L numbers, row = query, column = key, for a layer, a head and a quantity.

import { block, data, format, hasBlock, heads, length, sides, tokenName } from './data.js';

const size = length * length;
const KEPT = 40;
const planes = new Map();
const rolled = [];

const complete = data.layers.length === data.layerCount;

// The quantities that this page can show. Those without heads have one plane per layer.
export const QUANTITIES = [
  { name: 'attention', label: 'Attention weight', byHead: true },
  { name: 'norm', label: 'Value-weighted norm', byHead: true },
  complete && { name: 'rollout', label: 'Attention rollout', byHead: false },
  hasBlock('relevance-0') && {
    name: 'gradient', byHead: data.relevanceByHead,
    label: data.relevanceByHead ? 'Gradient × attention' : 'Gradient × attention, mean of heads',
  },
].filter(Boolean);

export const quantityOf = (name) => QUANTITIES.find((each) => each.name === name);

function table(levels) {
  return Float32Array.from({ length: 256 }, (_, code) => (code / levels) ** 2);
}

// The blocks hold the keys before the queries.
function turned(codes, offset, values) {
  const plane = new Float32Array(size);
  for (let key = 0; key < length; key++) {
    const column = offset + key * length;
    for (let query = 0; query < length; query++) {
      plane[query * length + key] = values[codes[column + query]];
    }
  }
  return plane;
}

const weightValues = table(data.levels);

async function attention(layer, head) {
  return turned(await block(`weights-${layer}`), head * size, weightValues);
}

export async function norms(layer) {
  const bytes = await block(`norms-${layer}`);
  const codes = new Uint16Array(bytes.buffer, 0, heads * length);
  const scale = data.layers[layer].normScale / 65535;
  return Float32Array.from(codes, (code) => code * scale);
}

async function valueWeighted(layer, head) {
  const plane = (await attention(layer, head)).slice();
  const norm = await norms(layer);
  for (let i = 0; i < size; i++) plane[i] *= norm[head * length + (i % length)];
  return plane;
}

async function gradient(layer, head) {
  const scale = data.layers[layer].relevanceScale;
  const values = table(data.relevanceLevels).map((value) => value * scale);
  return turned(await block(`relevance-${layer}`), (head ?? 0) * size, values);
}

async function meanOfHeads(layer) {
  const codes = await block(`weights-${layer}`);
  const sum = new Float32Array(size);
  for (let head = 0; head < heads; head++) {
    const offset = head * size;
    for (let i = 0; i < size; i++) sum[i] += weightValues[codes[offset + i]];
  }
  const mean = new Float32Array(size);
  for (let key = 0; key < length; key++) {
    for (let query = 0; query < length; query++) {
      mean[query * length + key] = sum[key * length + query] / heads;
    }
  }
  return mean;
}

const pause = () => new Promise((resolve) => setTimeout(resolve));

// Abnar and Zuidema 2020: the product of (mean + 1) / 2 over the layers up to this one.
async function rollout(layer) {
  for (let step = rolled.length; step <= layer; step++) rolled.push(rollStep(step));
  return rolled[layer];
}

async function rollStep(layer) {
  const before = layer === 0 ? null : await rolled[layer - 1];
  const mean = await meanOfHeads(layer);
  for (let i = 0; i < size; i++) mean[i] /= 2;
  for (let i = 0; i < length; i++) mean[i * length + i] += 0.5;
  if (before === null) return mean;
  const product = new Float32Array(size);
  for (let i = 0; i < length; i++) {
    const row = product.subarray(i * length, (i + 1) * length);
    for (let k = 0; k < length; k++) {
      const factor = mean[i * length + k];
      if (factor === 0) continue;
      const source = k * length;
      for (let j = 0; j < length; j++) row[j] += factor * before[source + j];
    }
    if (i % 64 === 63) await pause();
  }
  return product;
}

const MAKERS = { attention, norm: valueWeighted, gradient, rollout };

// Returns a promise of a plane. A few recent planes are kept.
export function plane(quantity, layer, head) {
  const key = `${quantity} ${layer} ${quantityOf(quantity).byHead ? head : ''}`;
  const found = planes.get(key) ?? MAKERS[quantity](layer, head);
  planes.delete(key);
  planes.set(key, found);
  if (planes.size > KEPT) planes.delete(planes.keys().next().value);
  return found;
}

// Returns a promise of the planes of a state: one per chosen head, or one for the layer.
export async function planesOf(state) {
  const { byHead } = quantityOf(state.quantity);
  const chosen = byHead ? state.heads : [null];
  return Promise.all(
    chosen.map(async (head) => ({ head, values: await plane(state.quantity, state.layer, head) })),
  );
}

// Returns the mean of planes.
export function mean(found) {
  if (found.length === 1) return found[0].values;
  const sum = new Float32Array(size);
  for (const { values } of found) for (let i = 0; i < size; i++) sum[i] += values[i];
  return sum.map((value) => value / found.length);
}

export function largest(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) if (values[i] > most) most = values[i];
  return most || 1;
}

const LISTED = 10;

// Returns the rows of a table of the largest values: head, query, key and value.
export function largestPairs(found, state) {
  const pass = sides(state.pairs);
  const kept = [];
  for (const { head, values } of found) {
    for (let query = 0; query < length; query++) {
      if (!pass.queries[query] || (state.token >= 0 && query !== state.token)) continue;
      for (let key = 0; key < length; key++) {
        const value = values[query * length + key];
        if (!pass.keys[key] || value <= (kept.length < LISTED ? 0 : kept.at(-1).value)) continue;
        kept.push({ head, query, key, value });
        kept.sort((a, b) => b.value - a.value);
        kept.length = Math.min(kept.length, LISTED);
      }
    }
  }
  return kept.map(({ head, query, key, value }) => [head ?? 'all', tokenName(query), tokenName(key), format(value)]);
}

// Returns a promise of the thumbnails of all layers and heads, as codes with 255 levels. Those of a
// short text are the weights themselves.
export async function thumbnails() {
  if (hasBlock('thumbnails')) return block('thumbnails');
  const layers = await Promise.all(data.layers.map((_, layer) => block(`weights-${layer}`)));
  const scaled = Float32Array.from({ length: 256 }, (_, code) => Math.round((code * 255) / data.levels));
  const codes = new Uint8Array(layers.length * heads * size);
  layers.forEach((weights, layer) => {
    for (let head = 0; head < heads; head++) codes.set(turned(weights, head * size, scaled), (layer * heads + head) * size);
  });
  return codes;
}

const decoded = new Map();

// Returns a promise of the queries and keys of a head, or of null if the page has none for the layer.
// Those of a few recent heads are kept.
export function neurons(layer, head) {
  const name = `${layer} ${head}`;
  const found = decoded.get(name) ?? readNeurons(layer, head);
  decoded.delete(name);
  decoded.set(name, found);
  if (decoded.size > 8) decoded.delete(decoded.keys().next().value);
  return found;
}

async function readNeurons(layer, head) {
  const entry = data.layers[layer];
  if (!entry.neurons) return null;
  const width = data.headSize;
  const [queries, keys] = await Promise.all(
    ['queries', 'keys'].map(async (name) => {
      const codes = await block(`${name}-${layer}`);
      const factor = entry[`${name}Scales`][head] / data.vectorLevels;
      const part = codes.subarray(head * length * width, (head + 1) * length * width);
      return Float32Array.from(part, (code) => (code - data.vectorLevels) * factor);
    }),
  );
  return { queries, keys };
}
