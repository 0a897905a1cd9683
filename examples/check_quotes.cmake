# The documents show the examples' files as they are: what is tested is what people read.
cmake_minimum_required(VERSION 3.25)

# "DOCUMENT|LANGUAGE|FILE": a block of the document is the file. "DOCUMENT|LANGUAGE|FILE|BEGINNING": it is a part of the
# file, from the line that begins so to the next one that is a single brace.
set(quotes
    "docs/cpp.md|cpp|examples/convert/main.cc"
    "docs/cpp.md|cmake|examples/convert/CMakeLists.txt"
    "docs/saving.md|cpp|examples/save_and_load/main.cc"
    "README.md|cpp|examples/save_and_load/main.cc")

foreach(quote IN LISTS quotes)
  string(REPLACE "|" ";" quote "${quote}")
  list(GET quote 0 document)
  list(GET quote 1 language)
  list(GET quote 2 file)
  list(LENGTH quote length)
  file(READ ${SOURCE}/${file} text)
  set(what ${file})
  if(length GREATER 3)
    list(GET quote 3 beginning)
    set(what "the part of ${file} that begins with \"${beginning}\"")
    string(FIND "\n${text}" "\n${beginning}" begin)
    if(begin EQUAL -1)
      message(FATAL_ERROR "there is no ${what}")
    endif()
    string(SUBSTRING "${text}" ${begin} -1 text)
    string(FIND "${text}" "\n}\n" end)
    if(end EQUAL -1)
      message(FATAL_ERROR "${what} has no end")
    endif()
    math(EXPR end "${end} + 3")
    string(SUBSTRING "${text}" 0 ${end} text)
  endif()
  file(READ ${SOURCE}/${document} content)
  string(FIND "${content}" "```${language}\n${text}```\n" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "${document} does not quote ${what} as it is")
  endif()
endforeach()
