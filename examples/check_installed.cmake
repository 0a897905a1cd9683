# Installs Spolia into a folder of the build tree, moves it, builds the examples with what is there, and compares what they
# write with the digests by PyTorch.
cmake_minimum_required(VERSION 3.25)

# must_run(COMMAND...): what the command prints, in `output`. Where it fails, so does the test.
macro(must_run)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE errors RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nended with ${result}:\n${output}${errors}")
  endif()
endmacro()

file(REMOVE_RECURSE ${WORK})
must_run(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/installed)

# The headers need nothing that is not installed.
file(GLOB_RECURSE headers RELATIVE ${WORK}/installed/include ${WORK}/installed/include/*.h)
list(TRANSFORM headers REPLACE "(.+)" "#include \"\\1\"")
list(JOIN headers "\n" includes)
file(WRITE ${WORK}/headers.cc "${includes}\n")
must_run(${COMPILER} -std=c++20 -fsyntax-only -I ${WORK}/installed/include ${WORK}/headers.cc)
if(includes MATCHES "gtest|testing|test_")
  message(FATAL_ERROR "headers of tests are installed: ${includes}")
endif()

if(SANITIZE)
  set(flags -D CMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})
endif()
must_run(${CMAKE_COMMAND} -S ${SOURCE}/examples/convert -B ${WORK}/build -G ${GENERATOR} ${flags}
         -D CMAKE_PREFIX_PATH=${WORK}/installed -D CMAKE_BUILD_TYPE=${CONFIG}
         -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
must_run(${CMAKE_COMMAND} --build ${WORK}/build)

set(case ${SOURCE}/tests/data/torch-2.14/fsdp2-4)
must_run(${WORK}/build/export_model ${case}/checkpoint model ${WORK}/model)
must_run(${WORK}/installed/bin/spolia digest ${WORK}/model --json)
file(READ ${case}/expected.json expected)

string(JSON tensors LENGTH "${output}")
if(tensors LESS 20)
  message(FATAL_ERROR "the model has only ${tensors} tensors")
endif()
math(EXPR last "${tensors} - 1")
foreach(index RANGE ${last})
  string(JSON name MEMBER "${output}" ${index})
  string(JSON found GET "${output}" ${name} sha256)
  string(JSON wanted GET "${expected}" tensors model.${name} sha256)
  if(NOT found STREQUAL wanted)
    message(FATAL_ERROR "${name}: ${found} was written where PyTorch has ${wanted}")
  endif()
endforeach()
