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

// Returns whether a query may attend to a key: padding and keys outside a window are hidden.
export function allowed(layer, query, key) {
  const { window } = data.layers[layer];
  if (data.sentences[query] === PADDING || data.sentences[key] === PADDING) return false;
  return window === null || Math.abs(query - key) <= window;
}

export const hasPair = data.sentences.includes(1);

// Returns whether a pair of tokens passes the filter of sentences: 'all', 'aa', 'ab', 'ba' or 'bb'.
export function inSentences(filter, query, key) {
  if (filter === 'all') return true;
  const wanted = (letter) => (letter === 'a' ? 0 : 1);
  return data.sentences[query] === wanted(filter[0]) && data.sentences[key] === wanted(filter[1]);
}

export const layerName = (layer) => `layer ${data.layers[layer].number}`;
export const tokenName = (token) => `${data.tokens[token]} (${token})`;

export function format(value) {
  if (value === 0) return '0';
  return value >= 0.0995 ? value.toFixed(value < 9.95 ? 2 : 1) : value.toPrecision(2);
}
