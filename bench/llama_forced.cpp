// llama.cpp's library on the work of `sakia bench`: a prompt of given ids, then given ids one by one.
//
//   llama_forced -m model.gguf --ids ids.txt -p 256 -n 64 [-t 2] [-ub 512] [--mmap 0|1]
//
// Prints one JSON object with the names of a receipt of `sakia bench`. As there, the rate of decoding is taken between
// tokens: the first forced token is not counted. Weights are mapped and not repacked, which is the only way that a
// model larger than memory runs in it.
//
//   g++ -O2 -std=c++17 -I $LLAMA/include -I $LLAMA/ggml/include llama_forced.cpp -o llama_forced
//       -L $BUILD/bin -lllama -lggml -lggml-base -Wl,-rpath,$BUILD/bin
#include "llama.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

struct Options {
    const char * model = nullptr;
    const char * ids = nullptr;
    int prompt = 256, decode = 64, threads = 2, micro_batch = 512;
    bool map = true;
};

struct Mark {
    std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
    long long read = 0;

    Mark() {
        std::ifstream io("/proc/self/io");
        std::string name;
        for (long long value; io >> name >> value;) {
            if (name == "read_bytes:") read = value;
        }
    }
};

static void fail(const std::string & what) {
    fprintf(stderr, "llama_forced: %s\n", what.c_str());
    exit(1);
}

static Options parse(int argc, char ** argv) {
    Options options;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i];
        const char * value = argv[i + 1];
        if (name == "-m") options.model = value;
        else if (name == "--ids") options.ids = value;
        else if (name == "-p") options.prompt = atoi(value);
        else if (name == "-n") options.decode = atoi(value);
        else if (name == "-t") options.threads = atoi(value);
        else if (name == "-ub") options.micro_batch = atoi(value);
        else if (name == "--mmap") options.map = atoi(value) != 0;
        else fail("unknown option " + name);
    }
    if (argc % 2 == 0 || !options.model || !options.ids) fail("see the head of the source for its options");
    if (options.prompt < 1 || options.decode < 2) fail("-p needs at least 1 token and -n at least 2");
    return options;
}

static std::vector<llama_token> read_ids(const Options & options) {
    std::ifstream file(options.ids);
    std::vector<llama_token> ids;
    for (llama_token id; file >> id;) ids.push_back(id);
    if (ids.size() < size_t(options.prompt + options.decode)) fail("too few ids");
    return ids;
}

static void print_phase(const char * name, const Mark & from, const Mark & to, int tokens, const char * end) {
    const double seconds = std::chrono::duration<double>(to.time - from.time).count();
    const double bytes = double(to.read - from.read);
    printf("  \"%s\": {\"tokens\": %d, \"elapsed_us\": %.0f, \"tokens_per_second\": %.6f, \"read_bytes\": %.0f, "
           "\"read_bytes_per_token\": %.0f}%s\n",
           name, tokens, seconds * 1e6, tokens / seconds, bytes, bytes / tokens, end);
}

int main(int argc, char ** argv) {
    const Options options = parse(argc, argv);
    std::vector<llama_token> ids = read_ids(options);
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.load_mode = options.map ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    model_params.use_extra_bufts = false;
    llama_model * model = llama_model_load_from_file(options.model, model_params);
    if (!model) fail("the model cannot be loaded");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = uint32_t(options.prompt + options.decode);
    params.n_batch = uint32_t(options.prompt);
    params.n_ubatch = uint32_t(options.micro_batch);
    params.n_threads = params.n_threads_batch = options.threads;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) fail("no context");

    const Mark start;
    if (llama_decode(context, llama_batch_get_one(ids.data(), options.prompt))) fail("the prompt failed");
    llama_synchronize(context);
    const Mark read;
    Mark first;
    for (int i = 0; i < options.decode; i++) {
        if (llama_decode(context, llama_batch_get_one(&ids[options.prompt + i], 1))) fail("a token failed");
        llama_synchronize(context);
        if (i == 0) first = Mark();
    }
    const Mark end;
    printf("{\n");
    print_phase("prefill", start, read, options.prompt, ",");
    print_phase("decode", first, end, options.decode - 1, "");
    printf("}\n");
    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
}
