// The grammar in VS Code's own engine: the scopes of scopes.json, and every shipped spec.
"use strict";

const assert = require("node:assert/strict");
const { readFileSync, readdirSync } = require("node:fs");
const { join } = require("node:path");
const { before, test } = require("node:test");
const oniguruma = require("vscode-oniguruma");
const { INITIAL, parseRawGrammar, Registry } = require("vscode-textmate");

const ROOT = join(__dirname, "..");
const SPECS = join(ROOT, "..", "..", "..", "specs");
let grammar;

before(async () => {
  const wasm = readFileSync(require.resolve("vscode-oniguruma/release/onig.wasm"));
  await oniguruma.loadWASM(wasm);
  const path = join(ROOT, "syntaxes", "dsc.tmLanguage.json");
  const registry = new Registry({
    onigLib: Promise.resolve({
      createOnigScanner: (patterns) => new oniguruma.OnigScanner(patterns),
      createOnigString: (text) => new oniguruma.OnigString(text),
    }),
    loadGrammar: async () => parseRawGrammar(readFileSync(path, "utf8"), path),
  });
  grammar = await registry.loadGrammar("source.dsc");
});

function tokenize(text) {
  let stack = INITIAL;
  return text.split("\n").map((line) => {
    const { tokens, ruleStack } = grammar.tokenizeLine(line, stack);
    stack = ruleStack;
    return tokens.map(({ startIndex, endIndex, scopes }) => [line.slice(startIndex, endIndex), scopes]);
  });
}

for (const [line, wanted] of JSON.parse(readFileSync(join(__dirname, "scopes.json"), "utf8"))) {
  test(line, () => {
    const start = Object.keys(wanted);
    const tokens = tokenize(line)[0];
    for (const word of start) {
      const at = line.indexOf(word);
      let offset = 0;
      const scopes = tokens.filter(([text]) => {
        const inside = offset <= at && at < offset + text.length;
        offset += text.length;
        return inside;
      })[0][1];
      assert.ok(scopes.some((scope) => scope.startsWith(wanted[word])), `${word}: ${scopes}`);
    }
  });
}

const specs = readdirSync(SPECS, { recursive: true }).filter((name) => name.endsWith(".dsc"));

test("every word of the shipped specs has a colour, and none leaks into the next line", () => {
  assert.ok(specs.length > 3);
  for (const name of specs) {
    const text = readFileSync(join(SPECS, name), "utf8");
    for (const line of tokenize(text)) {
      for (const [word, scopes] of line) {
        if (/\S/.test(word)) assert.ok(scopes.length > 1, `${name}: ${JSON.stringify(word)} in ${JSON.stringify(line)}`);
      }
    }
    assert.deepEqual(tokenize(`${text}\nrun x {`).at(-1)[0][1], ["source.dsc", "storage.type.block.dsc"], name);
  }
});
