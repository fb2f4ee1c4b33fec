// The client: starts `dsc lsp` and connects it to the specs. Plain CommonJS, so nothing has to be built.
"use strict";

const { existsSync } = require("node:fs");
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");
const { programOf } = require("./program");

const SELECTOR = [
  { scheme: "file", language: "dsc" },
  { scheme: "untitled", language: "dsc" },
];

/** @type {LanguageClient | undefined} */
let client;
let status;
let output;
let starting = Promise.resolve();

/** Run start, restart and stop one after the other, however fast they are requested. */
function inTurn(work) {
  starting = starting.then(work, work);
  return starting;
}

function program() {
  const setting = vscode.workspace.getConfiguration("dsc").get("path", "");
  const folders = (vscode.workspace.workspaceFolders ?? [])
    .filter((folder) => folder.uri.scheme === "file")
    .map((folder) => folder.uri.fsPath);
  return programOf(setting, folders, vscode.workspace.isTrusted, process.platform, existsSync);
}

async function start() {
  const command = program();
  status.text = "dsc: starting";
  status.severity = vscode.LanguageStatusSeverity.Information;
  client = new LanguageClient(
    "dsc",
    "dsc",
    { command, args: ["lsp"] },
    {
      documentSelector: SELECTOR,
      outputChannel: output,
      synchronize: { fileEvents: vscode.workspace.createFileSystemWatcher("**/*.dsc") },
    },
  );
  try {
    await client.start();
    status.text = "dsc";
    status.detail = command;
  } catch (error) {
    client = undefined;
    status.text = "dsc: not running";
    status.severity = vscode.LanguageStatusSeverity.Error;
    status.detail = String(error);
    report(command, error);
  }
}

async function stop() {
  const running = client;
  client = undefined;
  if (running !== undefined) await running.dispose();
}

/** Not awaited, because the message stays until the user dismisses it. */
function report(command, error) {
  output.appendLine(`${command} lsp: ${error}`);
  const message = `The language server did not start: ${command} lsp. Is it installed? pip install '.[lsp]'`;
  vscode.window.showErrorMessage(message, "Settings", "Output").then((choice) => {
    if (choice === "Settings") vscode.commands.executeCommand("workbench.action.openSettings", "dsc.path");
    if (choice === "Output") output.show();
  });
}

const restart = () => inTurn(async () => {
  await stop();
  await start();
});

async function activate(context) {
  output = vscode.window.createOutputChannel("dsc");
  status = vscode.languages.createLanguageStatusItem("dsc.status", SELECTOR);
  status.name = "dsc";
  status.command = { command: "dsc.restart", title: "Restart" };
  context.subscriptions.push(
    output,
    status,
    vscode.commands.registerCommand("dsc.restart", restart),
    vscode.commands.registerCommand("dsc.showOutput", () => output.show()),
    vscode.workspace.onDidChangeConfiguration((event) => {
      if (event.affectsConfiguration("dsc.path")) restart();
    }),
    vscode.workspace.onDidGrantWorkspaceTrust(restart),
  );
  await restart();
}

function deactivate() {
  return inTurn(stop);
}

module.exports = { activate, deactivate };
