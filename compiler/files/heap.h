/* Memory that is freed all at once. After a failure, no more is taken: test `failed` before you use what you took. */

#include <stdint.h>
#include <stdlib.h>

typedef struct Block {
    struct Block *next;
    int64_t alignment;
} Block;

typedef struct {
    Block *blocks;
    int failed;
} Heap;

static char scrap; /* never read or written */

static void *take(Heap *heap, int64_t size) {
    Block *block = heap->failed ? NULL : malloc(sizeof *block + size);
    if (!block) {
        heap->failed = 1;
        return &scrap;
    }
    *block = (Block){heap->blocks, 0};
    heap->blocks = block;
    return block + 1;
}

static void free_all(Heap *heap) {
    while (heap->blocks) {
        Block *block = heap->blocks;
        heap->blocks = block->next;
        free(block);
    }
}
