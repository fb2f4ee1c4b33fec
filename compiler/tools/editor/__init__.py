"""Editor support for specs: pure functions on text and analyses, and a language server.

`outline` reads text that need not parse; `completion`, `hover`, `navigation` and `actions` work on it and on
`dsl.load.analyse`, in character offsets; `protocol` converts the results to LSP messages; `server` keeps the documents.
"""
