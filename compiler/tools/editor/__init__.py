"""What an editor asks of a spec: pure features on text and analyses, and one server that speaks the protocol.

`structure` reads text that need not parse; `completion`, `hover`, `navigation` and `actions` answer from it and from
`dsl.load.analyse`, in offsets of characters; `protocol` turns the answers into messages; `server` keeps the documents.
"""
