// The library: what is registered with torch's dispatcher when it is loaded.
#include "tensors.h"
#include "width.h"

namespace kronecell {

static int64_t width() { return register_width(); }

STABLE_TORCH_LIBRARY(kronecell, m) { m.def("register_width() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(kronecell, CompositeExplicitAutograd, m) { m.impl("register_width", TORCH_BOX(&width)); }

}  // namespace kronecell
