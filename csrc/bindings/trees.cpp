// Ops on the shapes of trees.
#include "bindings.h"

namespace specvis {
namespace {

Tensors<4> select_tree(const Tensor& tokens, const Tensor& scores, const Tensor& parents, const Tensor& root,
                       const Tensor& size, int64_t num_nodes) {
  Arguments a("select_tree", "N");
  SelectTree batch = {};
  a.read("tokens", tokens, "BM", &batch.tokens);
  a.read("scores", scores, "BM", &batch.scores);
  a.read("parents", parents, "BM", &batch.parents);
  a.read("root", root, "B", &batch.root);
  a.read("size", size, "B", &batch.size);
  a.size("num_nodes", num_nodes, 'N');
  const int64_t B = batch.B = a.size('B'), N = batch.num_nodes = num_nodes;
  batch.M = a.size('M');
  Tensor node_tokens = a.make({B, N}, &batch.node_tokens), node_parents = a.make({B, N}, &batch.node_parents);
  Tensor source = a.make({B, N}, &batch.source), status = a.make({B}, &batch.status);
  RUN(select_tree, a, batch);
  return {node_tokens, node_parents, source, status};
}

Tensors<5> tree_links(const Tensor& parents) {
  Arguments a("tree_links", "N");
  TreeLinks batch = {};
  a.read("parents", parents, "BN", &batch.parents);
  const int64_t B = batch.B = a.size('B'), N = batch.N = a.size('N');
  Tensor ancestors = a.make({B, N, (N + 63) / 64}, &batch.ancestors), depth = a.make({B, N}, &batch.depth);
  Tensor first_child = a.make({B, N}, &batch.first_child), next_sibling = a.make({B, N}, &batch.next_sibling);
  Tensor status = a.make({B}, &batch.status);
  RUN(tree_links, a, batch);
  return {ancestors, depth, first_child, next_sibling, status};
}

Tensor tree_mask(const Tensor& ancestors, const MaybeTensor& lengths, const MaybeTensor& start, const std::string& form,
                 int64_t columns, ScalarType dtype) {
  Arguments a("tree_mask", "NC");
  TreeMask batch = {};
  a.read("ancestors", ancestors, "BNW", &batch.ancestors);
  a.read("lengths", lengths, "B", &batch.lengths);
  a.read("start", start, "B", &batch.start);
  a.size("columns", columns, 'C');
  const int number = a.name<int>("form", form, {"bool", "additive", "packed", "packed_rows"});
  const bool additive = number == 1, packed = number >= 2, rows = number == 3;
  const int64_t B = batch.B = a.size('B'), N = batch.N = a.size('N');
  a.require(a.size('W') == (N + 63) / 64, "ancestors", "must have a word for each 64 nodes");
  a.require(!additive || dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
            "dtype", "is no type of floats");
  batch.columns = columns;
  batch.row_bits = rows ? (columns + 7) / 8 * 8 : columns;
  batch.form = packed                       ? Form::bits
               : !additive                  ? Form::bytes
               : dtype == ScalarType::Float ? Form::float32
               : dtype == ScalarType::Half  ? Form::float16
                                            : Form::bfloat16;
  Tensor mask = rows     ? a.make({B, N, (columns + 7) / 8}, ScalarType::Byte)
                : packed ? a.make({B, (N * columns + 7) / 8}, ScalarType::Byte)
                         : a.make({B, N, columns}, additive ? dtype : ScalarType::Bool);
  batch.mask = mask.mutable_data_ptr();
  RUN(tree_mask, a, batch);
  return mask;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SPECVIS_NAMESPACE, DEVICE, m) {
  OP(select_tree);
  OP(tree_links);
  OP(tree_mask);
}

}  // namespace specvis
