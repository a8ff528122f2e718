// The data of the page: what Python wrote, and blocks of weights that are unpacked on first use.

export const data = JSON.parse(document.getElementById('data').textContent);
export const length = data.tokens.length;
export const heads = data.heads;
export const SPECIAL = -1;
export const PADDING = -2;

const unpacked = new Map();

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function inflate(name) {
  const bytes = fromBase64(document.getElementById(`block-${name}`).textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Returns a promise of the bytes of a block, which is unpacked once.
export function block(name) {
  if (!unpacked.has(name)) unpacked.set(name, inflate(name));
  return unpacked.get(name);
}

export const hasBlock = (name) => document.getElementById(`block-${name}`) !== null;

const exists = data.sentences.map((sentence) => sentence !== PADDING);

// Returns the window of the values of a layer, or null. Rollout passes through the layers before, so
// that the window of one layer does not limit it.
const windowOf = (layer, quantity) => (quantity === 'rollout' ? null : data.layers[layer].window);

// Returns whether a query may attend to a key: padding and keys outside a window are hidden.
export function allowed(layer, quantity, query, key) {
  if (!exists[query] || !exists[key]) return false;
  const window = windowOf(layer, quantity);
  return window === null || Math.abs(query - key) <= window;
}

// Says why a pair is hidden.
export function reason(layer, query, key) {
  if (!exists[query] || !exists[key]) return 'hidden: padding';
  return `hidden: ${layerName(layer)} attends at most ${data.layers[layer].window} tokens away`;
}

// Returns a sentence for the summary of a view, which starts with a space, or nothing.
export function windowNote({ layer, quantity }) {
  const window = windowOf(layer, quantity);
  return window === null ? '' : ` This layer attends at most ${window} tokens away.`;
}

export const hasPair = data.sentences.includes(1);

// Returns the queries and the keys that pass a filter of sentences: 'all', 'aa', 'ab', 'ba' or 'bb'.
export function sides(filter) {
  const side = (letter) => data.sentences.map((sentence) => filter === 'all' || sentence === 'ab'.indexOf(letter));
  return { queries: side(filter[0]), keys: side(filter[1]) };
}

export const layerName = (layer) => `layer ${data.layers[layer].number}`;
export const tokenName = (token) => `${data.tokens[token]} (${token})`;

export function format(value) {
  if (value === 0) return '0';
  return value >= 0.0995 ? value.toFixed(value < 9.95 ? 2 : 1) : value.toPrecision(2);
}
