// The client with a stand-in for the editor: what it starts, when, and that one server follows the other.
"use strict";

const assert = require("node:assert/strict");
const Module = require("node:module");
const { test } = require("node:test");
const { programOf } = require("../program");

test("the program: the setting, a trusted folder's environment, the PATH", () => {
  const exists = (path) => path === "/b/.venv/bin/dsc";
  assert.equal(programOf("/opt/dsc", ["/b"], true, "linux", exists), "/opt/dsc");
  assert.equal(programOf("", ["/a", "/b"], true, "linux", exists), "/b/.venv/bin/dsc");
  assert.equal(programOf("", ["/a", "/b"], false, "linux", exists), "dsc", "an untrusted workspace chooses nothing");
  assert.equal(programOf("", ["/a"], true, "linux", exists), "dsc");
  assert.equal(programOf("", ["C:\\b"], true, "win32", (path) => path === "C:\\b\\.venv\\Scripts\\dsc.exe").at(-1), "e");
});

function editor(fails = false) {
  const log = [];
  const commands = {};
  const events = {};
  class LanguageClient {
    constructor(id, name, server, options) {
      this.server = server;
      log.push(["new", server.command, ...server.args]);
      assert.deepEqual(options.documentSelector.map((each) => each.language), ["dsc", "dsc"]);
    }
    async start() {
      log.push(["start"]);
      if (fails) throw new Error("spawn ENOENT");
    }
    async dispose() {
      log.push(["dispose"]);
    }
  }
  const settings = { path: "/opt/dsc" };
  const vscode = {
    LanguageStatusSeverity: { Information: 0, Error: 2 },
    languages: { createLanguageStatusItem: () => ({ dispose() {} }) },
    window: {
      createOutputChannel: () => ({ appendLine: (line) => log.push(["output", line]), show() {} }),
      showErrorMessage: async (message) => void log.push(["error", message]),
    },
    commands: { registerCommand: (name, run) => ((commands[name] = run), { dispose() {} }), executeCommand() {} },
    workspace: {
      isTrusted: false,
      workspaceFolders: undefined,
      getConfiguration: () => ({ get: (key, otherwise) => settings[key] ?? otherwise }),
      createFileSystemWatcher: () => ({ dispose() {} }),
      onDidChangeConfiguration: (run) => ((events.configuration = run), { dispose() {} }),
      onDidGrantWorkspaceTrust: (run) => ((events.trust = run), { dispose() {} }),
    },
  };
  const original = Module._load;
  Module._load = function load(name, ...rest) {
    if (name === "vscode") return vscode;
    if (name === "vscode-languageclient/node") return { LanguageClient };
    return original.call(this, name, ...rest);
  };
  delete require.cache[require.resolve("../extension")];
  const extension = require("../extension");
  Module._load = original;
  return { extension, log, commands, events, settings };
}

test("it starts `dsc lsp`, and restarts one after the other", async () => {
  const { extension, log, commands, events, settings } = editor();
  await extension.activate({ subscriptions: [] });
  assert.deepEqual(log, [["new", "/opt/dsc", "lsp"], ["start"]]);
  settings.path = "/other/dsc";
  events.configuration({ affectsConfiguration: (key) => key === "dsc.path" });
  await Promise.all([commands["dsc.restart"](), events.trust()]);
  assert.deepEqual(
    log.map(([what]) => what),
    ["new", "start", "dispose", "new", "start", "dispose", "new", "start", "dispose", "new", "start"],
  );
  assert.equal(log.at(-2)[1], "/other/dsc");
  await extension.deactivate();
  assert.deepEqual(log.at(-1), ["dispose"]);
});

test("where the server cannot start, it is said, and the editor goes on", async () => {
  const { extension, log } = editor(true);
  await extension.activate({ subscriptions: [] });
  assert.match(log.find(([what]) => what === "error")[1], /\/opt\/dsc lsp/);
  await extension.deactivate();
});

test("every command and file of package.json is there", () => {
  const manifest = require("../package.json");
  const { commands, extension } = editor();
  return extension.activate({ subscriptions: [] }).then(() => {
    assert.deepEqual(Object.keys(commands).sort(), manifest.contributes.commands.map((each) => each.command).sort());
    for (const { path } of manifest.contributes.grammars) require(`../${path}`);
    for (const { configuration } of manifest.contributes.languages) require(`../${configuration}`);
  });
});
