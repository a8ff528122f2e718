// Builds ../page.html: one file with the program, its style and the licences of what is bundled.
import { build } from 'esbuild';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';

const out = process.argv[2] ?? '../page.html';
const result = await build({
  entryPoints: ['src/main.js'],
  bundle: true,
  format: 'iife',
  minify: true,
  target: 'es2022',
  legalComments: 'none',
  charset: 'ascii',
  metafile: true,
  write: false,
});
const style = await build({ entryPoints: ['src/style.css'], minify: true, write: false });

const inputs = Object.keys(result.metafile.inputs);
const names = inputs.map((name) => name.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1]);
const packages = [...new Set(names.filter(Boolean))].sort();
const licences = packages.map((name) => {
  const folder = `node_modules/${name}`;
  const { version } = JSON.parse(readFileSync(`${folder}/package.json`, 'utf8'));
  const file = ['LICENSE', 'LICENSE.md'].map((end) => `${folder}/${end}`).find(existsSync);
  return `${name} ${version}\n\n${readFileSync(file, 'utf8').trim()}`;
});

const program = result.outputFiles[0].text.trim();
if (/<\/script|<!--/i.test(program)) throw new Error('the program would end its own element');
const parts = { style: style.outputFiles[0].text.trim(), program, licences: licences.join('\n\n') };
let page = readFileSync('src/page.html', 'utf8');
for (const [name, text] of Object.entries(parts)) page = page.replace(`{{ ${name} }}`, () => text);
writeFileSync(out, page);
console.log(`${out}: ${page.length} characters, with ${packages.join(', ')}`);
